#!/usr/bin/env bash
# setup.sh DIR [ENGINE...]: install real engines for the CPU, and a tiny random model, under DIR; once.
# ENGINE: sglang, vllm; both when none is named. About 2 minutes and 3 GB each. What an earlier version of this installed
# is brought up to date.
# pip must be able to find PyTorch's CPU build: point PIP_EXTRA_INDEX_URL at PyTorch's CPU index where it cannot.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "${1:?usage: setup.sh DIR [ENGINE...]}"
cd "$1"
shift

# environment ENGINE: make its virtual environment, or add to it what is missing; its packages are then in $packages.
environment() {
  "venv-$1/bin/python" -c 'import pip' 2>/dev/null || "${PYTHON:-python3}" -m venv --clear "venv-$1"
  "venv-$1/bin/python" -m pip install --quiet --no-deps --requirement "$here/$1-requirements.txt"
  packages=$("venv-$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
}

install_sglang() {
  environment sglang
  rm -f "$packages"/torchaudio/lib/*.so # built for CUDA: they do not load beside a CPU torch
  cp "$here/sglang_on_cpu.py" "$packages/"
  echo 'import sglang_on_cpu' >"$packages/sitecustomize.py"
}

install_vllm() {
  environment vllm
  # vLLM asks for its version by the name "vllm", which the CPU build does not have, and takes the CPU for its platform
  # when that version says "cpu".
  local shim="$packages/vllm-0.32.0+cpu.dist-info"
  mkdir -p "$shim"
  printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n' >"$shim/METADATA"
  # NIXL's progress thread never sleeps: without this, each idle server keeps most of a core busy.
  patch_line "$packages/nixl_cu12/_api.py" 'agent_config\.pthrDelay = 0' 'agent_config.pthrDelay = 1000  # microseconds'
  # The Mooncake connector asks for the current accelerator, which raises where there is none; 0 is what it means by "the first".
  patch_line "$packages/vllm/distributed/kv_transfer/kv_connector/v1/mooncake/mooncake_connector.py" \
    'self\.device_id = torch\.accelerator\.current_device_index()' 'self.device_id = 0'
}

# patch_line FILE PATTERN TEXT: replace the one occurrence of PATTERN, unless that has been done; anything else is another
# version of the file.
patch_line() {
  [ "$(grep -c "$2" "$1")" = 0 ] && grep -qF "$3" "$1" && return
  [ "$(grep -c "$2" "$1")" = 1 ] || { echo "$1: \"$2\" is not there once; is this another version?" >&2; exit 1; }
  sed -i "s/$2/$3/" "$1"
}

# Mooncake, which moves the KV cache, needs the RDMA libraries even for TCP.
if ! ldconfig -p | grep -q libibverbs; then
  apt-get update -qq
  apt-get install -y -qq --no-install-recommends libibverbs1 librdmacm1 libnuma1 ibverbs-providers
fi

[ $# -gt 0 ] || set -- sglang vllm
for engine; do
  recipe=$(cat "$here/setup.sh" "$here/$engine-requirements.txt" "$here/sglang_on_cpu.py" "$here/tiny_model.py" | sha256sum)
  [ "$(cat "ready-$engine" 2>/dev/null)" = "$recipe" ] && continue
  rm -f "ready-$engine"
  "install_$engine"
  # The random weights come from torch's generator: one model for all engines, made by whichever is installed first.
  [ -e model/config.json ] || SGLANG_ON_CPU=on "venv-$engine/bin/python" "$here/tiny_model.py" model
  echo "$recipe" >"ready-$engine"
done
