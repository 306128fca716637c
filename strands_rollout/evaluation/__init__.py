"""Evaluation without slime: many samples of each problem, results that survive a kill, and what they amount to.

`run` is the glue; read it first. `options`, `plan` and `eval_config` say what is asked; `session`, `workers` and
`episodes` do it; `identity`, `run_folder` and `results_file` keep it; `statistics`, `majority` and `report` judge it;
`tables` shows it.
"""
