#!/bin/sh
# Makes .horovod, an environment with the last Horovod (0.28.1, for TensorFlow 2.12). Needs Python 3.10, cmake, g++.
set -eu
cd "$(dirname "$0")"
"${PYTHON:-python3.10}" -m venv .horovod
.horovod/bin/pip install "setuptools<70" wheel "numpy<1.24" tensorflow-cpu==2.12.1 "protobuf<4.24" cmake==3.27.9 cffi cloudpickle psutil pyyaml packaging
PATH="$PWD/.horovod/bin:$PATH" HOROVOD_WITH_TENSORFLOW=1 HOROVOD_WITH_GLOO=1 HOROVOD_WITHOUT_MPI=1 \
HOROVOD_WITHOUT_PYTORCH=1 HOROVOD_WITHOUT_MXNET=1 \
    .horovod/bin/pip install --no-build-isolation horovod==0.28.1
.horovod/bin/python -c "import horovod.tensorflow as hvd; assert hvd.gloo_built()"
