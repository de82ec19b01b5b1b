"""The optional native core; everything else about the project is in ``setup.cfg``."""

import sysconfig
from glob import glob

from setuptools import Extension, setup

# One module serves all versions from 3.11 on, but interpreters without a global lock: they have no stable interface.
STABLE = not sysconfig.get_config_var("Py_GIL_DISABLED")

CORE = Extension(
    "pybk._native",
    sources=sorted(glob("src/native/*.c")),
    depends=sorted(glob("src/native/*.h")),
    extra_compile_args=["-std=c11", "-O3", "-pthread"],
    extra_link_args=["-pthread"],
    define_macros=[("Py_LIMITED_API", "0x030B0000")] if STABLE else [],
    py_limited_api=STABLE,
    optional=True,  # without a compiler pybk is installed all the same, and computes in Python
)

setup(ext_modules=[CORE], options={"bdist_wheel": {"py_limited_api": "cp311"}} if STABLE else {})
