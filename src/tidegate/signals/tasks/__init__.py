"""Tasks: files, generators, published sets, and the ideal way through them."""

from tidegate.signals.tasks.convert import bfcl_demonstrations, bfcl_tasks, convert, gsm8k_tasks
from tidegate.signals.tasks.experts import expert_answer
from tidegate.signals.tasks.file import read_tasks, task_object, write_tasks
from tidegate.signals.tasks.generate import SYSTEM_PROMPT, TASK_KINDS, demonstrations, generate_tasks

__all__ = [
    "SYSTEM_PROMPT",
    "TASK_KINDS",
    "bfcl_demonstrations",
    "bfcl_tasks",
    "convert",
    "demonstrations",
    "expert_answer",
    "generate_tasks",
    "gsm8k_tasks",
    "read_tasks",
    "task_object",
    "write_tasks",
]
