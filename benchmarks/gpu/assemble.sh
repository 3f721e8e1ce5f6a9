#!/usr/bin/env bash
# Puts together on another machine what carry.py has cut, and installs TensorFlow from it for that machine's python3.
#
#     assemble.sh take FOLDER      checks the pieces that were copied, and moves them to FOLDER, outside of the checkout
#     assemble.sh install FOLDER   installs the wheels into FOLDER/site, and writes FOLDER/environment
#
# `. FOLDER/environment` then has python3 import TensorFlow. TensorFlow 2.21 asks for CUDA 12 by name. A library of
# which FOLDER/site has none is looked for beneath the `nvidia` packages of python3, where it may be that of CUDA 13:
# FOLDER/links has it under the old name.
set -euo pipefail
cd "$(dirname "$0")/pieces"
folder=${2:?'Usage: assemble.sh take|install FOLDER'}
mkdir -p "$folder"
folder=$(cd "$folder" && pwd)

take() {
  sha256sum --check --ignore-missing --strict SHA256SUMS
  cp SHA256SUMS "$folder"
  mv piece-* "$folder"
  echo "$(ls "$folder" | grep -c '^piece-') of $(wc -l < SHA256SUMS) pieces"
}

install() {
  (cd "$folder" && sha256sum --check --quiet --strict SHA256SUMS)
  rm -rf "$folder/wheels" "$folder/site" "$folder/links"
  mkdir "$folder/wheels" "$folder/links"
  (cd "$folder" && cut -c 67- SHA256SUMS | xargs cat) | tar -x -C "$folder/wheels"
  python3 -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir --target "$folder/site" \
    "$folder"/wheels/*.whl
  link_libraries
  {
    echo "export PYTHONPATH=$folder/site"
    # shellcheck disable=SC2016  # what the variable holds when it is read
    echo "export LD_LIBRARY_PATH=$({
      libraries_of "$folder/site"
      echo "$folder/links"
      libraries_of_python3
    } | paste -sd:)"'${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}'
    # Most kernels of TensorFlow 2.21 have code for compute capability 9.0 as PTX alone, which the driver compiles.
    echo "export CUDA_CACHE_PATH=$folder/cache CUDA_CACHE_MAXSIZE=4294967296"
    if nvcc=$(command -v nvcc); then  # for XLA, which takes libdevice from there
      echo "export XLA_FLAGS=--xla_gpu_cuda_data_dir=$(dirname "$(dirname "$(readlink -f "$nvcc")")")"
    fi
  } > "$folder/environment"
  . "$folder/environment"
  python3 -c 'import tensorflow as tf; print("TensorFlow", tf.__version__, tf.config.list_physical_devices("GPU"))'
}

libraries_of() {
  find "$1/nvidia" -name '*.so*' -printf '%h\n' 2>/dev/null | sort -u || true
}

libraries_of_python3() {
  python3 -c 'import sys; print("\n".join(path for path in sys.path if path))' | while read -r path; do
    libraries_of "$path"
  done
}

# A name that python3's packages do not have is linked to the library of that name of the highest version.
link_libraries() {
  local directories name found
  directories=$(libraries_of_python3)
  for name in libcudart.so.12 libcublas.so.12 libcublasLt.so.12 libcufft.so.11 libcusolver.so.11 libcusparse.so.12 \
    libcudnn.so.9 libnccl.so.2 libcupti.so.12 libnvrtc.so.12 libnvJitLink.so.12; do
    found=$(for directory in $(libraries_of "$folder/site") $directories; do ls "$directory/$name" 2>/dev/null; done |
      head -n 1) || true
    if [ -z "$found" ]; then
      found=$(for directory in $directories; do ls "$directory/${name%%.so*}.so".* 2>/dev/null; done |
        sort -V | tail -n 1) || true
      [ -z "$found" ] || ln -s "$found" "$folder/links/$name"
    fi
    echo "$name: ${found:-none}"
  done
}

case $1 in
  take | install) "$1" ;;
  *) echo "The first argument is take or install, not $1." >&2 && exit 2 ;;
esac
