"""Builds gather_kernel.cc for the TensorFlow of the Python that runs this: python build.py [OUTPUT.so]."""

import os
import subprocess
import sys


def build(output):
    """Compiles against the headers in the wheel; returns the path. CXX names another compiler than g++."""
    import tensorflow as tf

    source = os.path.join(os.path.dirname(os.path.abspath(__file__)), "gather_kernel.cc")
    command = [os.environ.get("CXX", "g++"), "-std=c++11", "-O2", "-fPIC", "-shared", "-w", source, "-o", output]
    subprocess.check_call(command + tf.sysconfig.get_compile_flags() + tf.sysconfig.get_link_flags())
    return output


if __name__ == "__main__":
    print(build(sys.argv[1] if len(sys.argv) > 1 else "libtfring_gather.so"))
