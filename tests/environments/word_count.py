"""A verifiers taskset with a tool server, as `vf-init --add-tool` creates one, with faults that the settings choose."""

import asyncio
import os
from pathlib import Path

import verifiers.v1 as vf

__all__ = ["WordCountTaskset"]


class WordCountToolset(vf.Toolset[vf.ToolsetConfig]):
    TOOL_PREFIX = "words"

    @vf.tool
    def count(self, text: str, call: str = "") -> int:
        """Count the words of a text."""
        if record := os.environ.get("RECORDED_TOOLS"):  # the file of `recorded_tools`
            with Path(record).open("a") as file:
                file.write(f"{call}\n")
        return len(text.split())


class WordCountData(vf.TaskData):
    answer: str


class WordCountTaskConfig(vf.TaskConfig):
    tools: vf.ToolsetConfig = vf.ToolsetConfig()
    fault: str = ""


class WordCountTask(vf.Task[WordCountData, vf.State, WordCountTaskConfig]):
    @classmethod
    def toolsets(cls, config: WordCountTaskConfig) -> list[vf.Toolset]:
        return [WordCountToolset(config.tools)]

    async def setup(self, trace: vf.Trace, runtime: vf.Runtime) -> None:
        if self.config.fault == "exit":
            raise SystemExit(3)
        if self.config.fault == "setup":
            raise OSError("no disk")

    async def finalize(self, trace: vf.Trace, runtime: vf.Runtime) -> None:
        if self.config.fault == "hang":
            await asyncio.sleep(600)

    @vf.reward(weight=2.0)
    async def correct(self, trace: vf.Trace) -> float:
        if self.config.fault == "scorer":
            raise ZeroDivisionError("no words")
        return float(self.data.answer in trace.last_reply)

    @vf.metric
    async def replies(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)


class WordCountConfig(vf.TasksetConfig):
    names: tuple[str, ...] = ("one",)
    split: str = "train"
    image: str | None = None
    task: WordCountTaskConfig = WordCountTaskConfig()


class WordCountTaskset(vf.Taskset[WordCountTask, WordCountConfig]):
    def load(self) -> list[WordCountTask]:
        question = {"train": "What is 17 times 2?", "test": "What is 2 times 17?"}[self.config.split]
        return [
            WordCountTask(
                WordCountData(prompt=f"[[{name}/{number}]] {question}", answer="34", image=self.config.image),
                self.config.task,
            )
            for number, name in enumerate(self.config.names)
        ]


if __name__ == "__main__":
    WordCountToolset.run()
