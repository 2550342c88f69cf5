"""Make idle threads sleep instead of spin, because tests may run more threads than cores. Read by torch on import."""

import os

os.environ["OMP_WAIT_POLICY"] = "passive"
