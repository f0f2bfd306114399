#!/usr/bin/env bash
# Builds the wheel of Horovod for an environment's TensorFlow, and prints its path: bash tools/build_horovod.sh [python]
#
# The source distribution as it stands does not build against this TensorFlow: xla_mpi_ops.cc, which only GPUs under XLA
# need, includes headers that have moved; it is left out. The wheel has Gloo between hosts, and neither MPI nor GPUs.
#
# It takes two to three minutes on two cores. The wheel is kept in a cache, by the versions of Horovod, TensorFlow and
# Python, the machine, and this script's content, so that a second call takes a second.
set -euo pipefail

VERSION=0.28.1
SHA256=92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0

fail() {
  echo "tools/build_horovod.sh: $1" >&2
  exit 1
}

python=${1:-.venv/bin/python}
"$python" -c '' 2>/dev/null || fail "'$python' does not run; make the environment first (make lint), or name a Python"
about='import importlib.metadata as m, sysconfig as s
print(m.version("tensorflow"), "cp" + s.get_config_var("py_version_nodot"), s.get_platform().replace("-", "_"))'
about=$("$python" -c "$about" 2>/dev/null) || fail "'$python' has no TensorFlow; install the project there first"
read -r tensorflow tag platform <<<"$about"

script=$(sha256sum "${BASH_SOURCE[0]}" | cut -c 1-12)
cache=${XDG_CACHE_HOME:-${HOME:?}/.cache}/autodist_py/horovod/$VERSION-tensorflow-$tensorflow-$tag-$platform-$script
mkdir -p "$cache"
wheel=$(find "$cache" -name 'horovod-*.whl')
if [ -n "$wheel" ]; then
  echo "$wheel"
  exit
fi

for tool in cmake g++ make; do
  command -v "$tool" >/dev/null || missing="${missing-} $tool"
done
[ -z "${missing-}" ] || fail "missing:$missing; install a C++ compiler, make and CMake 3.13 or later
  (Debian: apt-get install g++ make cmake; CMake alone: pip install cmake)"
"$python" -c 'import setuptools, wheel' 2>/dev/null || fail "'$python' lacks setuptools and wheel; pip install them"

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
log=$cache/build.log

run() {  # A step of the build: its output goes to the log, whose end is shown if it fails.
  "$@" >>"$log" 2>&1 || {
    tail -n 30 "$log" >&2
    fail "'$*' failed; all of its output is in $log"
  }
}

: >"$log"
echo "horovod==$VERSION --hash=sha256:$SHA256" >"$work/requirements.txt"
run "$python" -m pip install --quiet cloudpickle packaging psutil pyyaml  # What its setup.py needs.
run "$python" -m pip download --require-hashes --no-deps --no-binary :all: --no-build-isolation --no-cache-dir \
  --dest "$work" --requirement "$work/requirements.txt"
run tar -xzf "$work/horovod-$VERSION.tar.gz" -C "$work"
lists=$work/horovod-$VERSION/horovod/tensorflow/CMakeLists.txt
grep -q xla_mpi_ops.cc "$lists" || fail "$lists names no xla_mpi_ops.cc any more; see what it has instead"
sed -i /xla_mpi_ops.cc/d "$lists"

echo "tools/build_horovod.sh: building Horovod $VERSION for TensorFlow $tensorflow; this takes minutes" >&2
bin=$(dirname "$(command -v "$python")")
run env PATH="$bin:$PATH" MAKEFLAGS="-j$(nproc)" CMAKE_POLICY_VERSION_MINIMUM=3.13 \
  HOROVOD_WITH_TENSORFLOW=1 HOROVOD_WITHOUT_PYTORCH=1 HOROVOD_WITHOUT_MXNET=1 \
  HOROVOD_WITH_GLOO=1 HOROVOD_WITHOUT_MPI=1 HOROVOD_CPU_OPERATIONS=GLOO \
  "$python" -m pip wheel --no-deps --no-build-isolation --no-cache-dir --wheel-dir "$work/wheel" \
  "$work/horovod-$VERSION"
wheel=$(find "$work/wheel" -name 'horovod-*.whl')
cp "$wheel" "$cache/unfinished"  # Often to another file system: what is interrupted is no wheel.
mv "$cache/unfinished" "$cache/$(basename "$wheel")"
find "$cache" -name 'horovod-*.whl'
