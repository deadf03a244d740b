#!/usr/bin/env bash
# A SLURM of one node on this machine, for the test of `copyhead run --slurm`: Debian's packages, as root. Does nothing where one runs.
set -euo pipefail
if command -v sinfo > /dev/null && sinfo --noheader > /dev/null 2>&1; then
    exit 0
fi
if ! command -v slurmctld > /dev/null; then
    apt-get update --quiet --quiet
    DEBIAN_FRONTEND=noninteractive apt-get install --quiet --quiet --yes --no-install-recommends slurmctld slurmd slurm-client munge > /dev/null
fi
name=$(hostname --short)
mkdir -p /etc/slurm /var/spool/slurmctld /var/spool/slurmd /run/munge
cat > /etc/slurm/slurm.conf <<CONF
ClusterName=copyhead
SlurmctldHost=$name(127.0.0.1)
AuthType=auth/munge
SlurmUser=root
SlurmdUser=root
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
StateSaveLocation=/var/spool/slurmctld
SlurmdSpoolDir=/var/spool/slurmd
SlurmctldLogFile=/var/log/slurmctld.log
SlurmdLogFile=/var/log/slurmd.log
ReturnToService=2
NodeName=$name NodeAddr=127.0.0.1 CPUs=$(nproc) RealMemory=2000 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
CONF
chown munge:munge /run/munge
pgrep munged > /dev/null || runuser -u munge -- munged
slurmctld
slurmd
for _ in $(seq 60); do
    if [ "$(sinfo --noheader --format=%T)" = idle ]; then
        exit 0
    fi
    sleep 0.5
done
sinfo
tail -n 5 /var/log/slurmctld.log /var/log/slurmd.log
exit 1
