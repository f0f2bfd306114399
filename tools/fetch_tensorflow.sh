#!/usr/bin/env bash
# TensorFlow's own tests of tf.distribute, of the version that is given, into .cache/tensorflow-VERSION.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

folder=.cache/tensorflow-$1
if [[ ! -d $folder ]]; then
  git clone --quiet --depth 1 --filter blob:none --sparse --branch "v$1" https://github.com/tensorflow/tensorflow "$folder.part"
  git -C "$folder.part" sparse-checkout set tensorflow/python/distribute
  mv "$folder.part" "$folder"
fi
