# Two nodes on one machine: each has a network namespace and an address of its own, and a virtual cable joins them.
#   unshare -Urnp --mount-proc --kill-child sh two_nodes.sh 1gbit python my_script.py
# runs the command twice on each node, as srun does with --nodes=2 --ntasks-per-node=2; each card sends at that rate.
# tc must be in PATH.
set -e
if [ -z "$NODE" ]; then
    ip link add card0 type veth peer name card1
    NODE=1 unshare -n sh "$0" "$@" &
    while ip link show card1 >/dev/null 2>&1; do  # until node 1 is in its namespace, and the card with it
        ip link set card1 netns $!
    done
    NODE=0
fi
until ip link set "card$NODE" up 2>/dev/null; do sleep 0.01; done  # node 1 waits for its card
ip link set lo up
ip address add "10.0.0.$((NODE + 1))/24" dev "card$NODE"
tc qdisc add dev "card$NODE" root tbf rate "$1" burst 128kb latency 50ms
shift
export MASTER_ADDR=10.0.0.1 MASTER_PORT=29500 WORLD_SIZE=4 GLOO_SOCKET_IFNAME="card$NODE"
for LOCAL_RANK in 0 1; do
    export LOCAL_RANK RANK=$((2 * NODE + LOCAL_RANK))
    "$@" &
done
wait
