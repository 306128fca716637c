"""A verifiers environment with two seats: a solver, and a checker that reads the solver's answer."""

import verifiers.v1 as vf

__all__ = ["TwoSeatsEnv"]


class TwoSeatsConfig(vf.EnvConfig):
    solver: vf.AgentConfig = vf.AgentConfig()
    checker: vf.AgentConfig = vf.AgentConfig()


class TwoSeatsEnv(vf.Env[TwoSeatsConfig]):
    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        solved = await agents.solver.run(task)
        question = f"{task.data.prompt} The answer is: {solved.last_reply} Is that right?"
        await agents.checker.run(type(task)(task.data.model_copy(update={"prompt": question}), task.config))
