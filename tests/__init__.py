"""Threads wait without working, also where there are more of them than cores. Read when torch is imported."""

import os

os.environ["OMP_WAIT_POLICY"] = "passive"
