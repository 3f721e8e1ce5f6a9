#!/usr/bin/env bash
# Installs what the tests of real engines need from Debian, as root: sshd, SLURM, network namespaces.
# Without it those tests are skipped and say so. MPI and Ray come from the package index by themselves.
set -euo pipefail
if command -v sshd >/dev/null && command -v slurmctld >/dev/null && command -v munged >/dev/null && command -v ip >/dev/null; then
  exit
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -y -qq --no-install-recommends openssh-client openssh-server iproute2 slurm-wlm munge >/dev/null
