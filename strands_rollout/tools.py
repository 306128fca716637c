"""The code tool under a short dotted path for configurations: `strands_rollout.tools.execute_python_code`."""

from strands_rollout.code_tool.tool import execute_python_code as execute_python_code
