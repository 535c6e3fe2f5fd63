"""What pyproject.toml cannot say in a settled form: the C accelerator, left out where it does not compile."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        # values/native.py loads it by ctypes: it holds nothing of Python's, so one build serves every version.
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
