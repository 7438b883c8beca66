#!/usr/bin/env bash
# setup.sh DIR: install a real SGLang for the CPU and a tiny random model under DIR. About 2 minutes and 3 GB; once.
# pip must be able to find PyTorch's CPU build: point PIP_EXTRA_INDEX_URL at PyTorch's CPU index where it cannot.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "${1:?usage: setup.sh DIR}"
cd "$1"

recipe=$(cat "$here/setup.sh" "$here/sglang-requirements.txt" "$here/sglang_on_cpu.py" "$here/tiny_model.py" | sha256sum)
[ "$(cat ready 2>/dev/null)" = "$recipe" ] && exit 0

# Mooncake, which moves the KV cache, needs the RDMA libraries even for TCP.
if ! ldconfig -p | grep -q libibverbs; then
  apt-get update -qq
  apt-get install -y -qq --no-install-recommends libibverbs1 librdmacm1 libnuma1 ibverbs-providers
fi

"${PYTHON:-python3}" -m venv venv
venv/bin/pip install --quiet --no-deps --requirement "$here/sglang-requirements.txt"
packages=$(venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
rm -f "$packages"/torchaudio/lib/*.so # built for CUDA: they do not load beside a CPU torch
cp "$here/sglang_on_cpu.py" "$packages/"
echo 'import sglang_on_cpu' >"$packages/sitecustomize.py"
[ -e model/config.json ] || SGLANG_ON_CPU=on venv/bin/python "$here/tiny_model.py" model
echo "$recipe" >ready
