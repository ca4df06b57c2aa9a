#!/usr/bin/env bash
# Everything that `make test` and the notebooks need: the browser, .venv and the default model.
set -euo pipefail
sudo apt-get update -qq
sudo apt-get install -y -qq --no-install-recommends make chromium fonts-dejavu-core
make setup
.venv/bin/quasar-lab fetch
.venv/bin/quasar-lab doctor
