"""The C accelerator, which pyproject.toml has no settled way to declare. It is left out if it does not compile."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        # values/native.py loads it with ctypes. It uses nothing of Python's API, so one build serves all versions.
        Extension(
            "pg_cdc_source.values._accelerator",
            ["pg_cdc_source/values/_accelerator.c"],
            extra_compile_args=["-O2", "-fvisibility=hidden"],
            optional=True,
            py_limited_api=True,
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
