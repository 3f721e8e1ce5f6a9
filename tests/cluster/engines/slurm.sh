#!/usr/bin/env bash
# A SLURM of one node on this machine, for as long as a command runs; as root, on Debian.
#
#   apt-get install slurm-wlm munge
#   tests/cluster/engines/slurm.sh srun -n 3 python train.py
#
# Everything it writes is in a folder of its own.
set -euo pipefail
# In a PID namespace of its own, with which all ends, however this script does: SLURM's steps are nobody's children.
if [ "${TFRING_SLURM_NAMESPACE:-}" != 1 ]; then
  TFRING_SLURM_NAMESPACE=1 exec unshare --pid --mount-proc --fork --kill-child "$0" "$@"
fi
unset TFRING_SLURM_NAMESPACE
folder=$(mktemp -d)
chmod 755 "$folder"
trap 'rm -rf "$folder"' EXIT
host=$(hostname -s)

head -c 1024 /dev/urandom > "$folder/key"
chmod 400 "$folder/key"
munged --foreground --force --key-file="$folder/key" --socket="$folder/munge" --log-file="$folder/munged.log" \
  --pid-file="$folder/munged.pid" --seed-file="$folder/seed" > "$folder/munged.out" 2>&1 &

free_port() { python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'; }
cat > "$folder/slurm.conf" <<CONF
ClusterName=tfring
SlurmctldHost=$host(127.0.0.1)
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket=$folder/munge
CredType=cred/munge
SlurmctldPort=$(free_port)
SlurmdPort=$(free_port)
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SwitchType=switch/none
MpiDefault=none
SchedulerParameters=sched_min_interval=0
FirstJobId=$((RANDOM * 100 + RANDOM % 100 + 1))
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
ReturnToService=2
MailProg=/bin/true
NodeName=$host NodeAddr=127.0.0.1 CPUs=8 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:8
SlurmdParameters=config_overrides
CONF
mkdir "$folder/state" "$folder/spool"
export SLURM_CONF="$folder/slurm.conf"
slurmctld -D > "$folder/slurmctld.log" 2>&1 &
slurmd -D -N "$host" > "$folder/slurmd.log" 2>&1 &
for _ in $(seq 100); do
  if sinfo --noheader --format=%T 2>/dev/null | grep -q idle; then ready=1; break; fi
  sleep 0.2
done
if [ -z "${ready:-}" ]; then
  echo "slurm.sh: SLURM did not start:" >&2
  tail -n 20 "$folder"/*.log "$folder"/munged.out >&2
  exit 69
fi
"$@"
