#!/usr/bin/env bash
# Run an engine between two sweeps:
#
#   entrypoint.sh vllm serve MODEL ...
#
# What an earlier engine left in shared memory is removed, the doctor looks at the command line, the engine runs with this
# script's signals passed on to it, and when it has ended, however it did, what it left is removed. The exit status is the
# engine's. A sweep or a doctor that fails says so and keeps no engine from starting.
#
#   KVLIFT               the program (default: kvlift)
#   KVLIFT_SWEEP_FLAGS   more flags of kvlift sweep, such as "--family nccl --family python"
#   KVLIFT_SWEEP_WAIT    how long the last sweep waits for the engine's processes to let go (default: 5s)
#   KVLIFT_DOCTOR        warn (default): show what it finds; strict: do not start what it says cannot work; off
#
# A container needs a stop timeout above the engine's own and this wait together: Docker's 10 s are not enough.
set -u
set -m # the engine gets a process group, its signals as they are by default, and its standard input

if [ $# -eq 0 ]; then
	echo "usage: ${0##*/} ENGINE [ARGUMENT...]" >&2
	exit 2
fi

kvlift=${KVLIFT:-kvlift}
say() { printf 'entrypoint: %s\n' "$*" >&2; }

# A signal before the engine starts ends the script, also as PID 1, which the kernel shields from signals that it does not
# handle. One that comes before the engine's pid is known is passed on as soon as it is.
starting='' pid='' helper='' early='' signalled=''
pass() {
	signalled=1
	if [ -n "$pid" ]; then
		kill -s "$1" -- "$pid" 2>/dev/null
	elif [ -n "$starting" ]; then
		early="$early $1"
	else
		case $1 in
		USR1 | USR2) early="$early $1" ;;
		*)
			[ -z "$helper" ] || kill -s TERM -- "-$helper" 2>/dev/null
			exit $((128 + $(kill -l "$1")))
			;;
		esac
	fi
}
for s in TERM INT HUP QUIT USR1 USR2; do
	# shellcheck disable=SC2064 # the name is meant as it is now
	trap "pass $s" "$s"
done

# Run kvlift such that a signal need not wait for its end.
ask() {
	local status
	"$kvlift" "$@" >&2 &
	helper=$!
	while :; do
		wait "$helper"
		status=$?
		kill -0 "$helper" 2>/dev/null || break
	done
	helper=''
	return "$status"
}

sweep() {
	# shellcheck disable=SC2086 # flags are words
	ask sweep --delete ${KVLIFT_SWEEP_FLAGS:-} "$@" || say "kvlift sweep ended with status $?; going on"
}

# The doctor's findings are shown as they are.
doctor() {
	local status=0
	ask doctor -- "$@" || status=$?
	[ "$status" -eq 0 ] || say "kvlift doctor ended with status $status"
	[ "$status" -ne 3 ] || [ "${KVLIFT_DOCTOR:-warn}" != strict ]
}

if command -v "$kvlift" >/dev/null; then
	sweep
	if [ "${KVLIFT_DOCTOR:-warn}" != off ] && ! doctor "$@"; then
		say "not started (KVLIFT_DOCTOR=strict)"
		exit 3
	fi
else
	say "$kvlift is not there: the engine starts without it"
fi

starting=1
"$@" <&0 &
pid=$!
for s in $early; do kill -s "$s" -- "$pid" 2>/dev/null; done

# wait returns early when a signal was passed on, and the engine may go on for as long as it likes. Before bash 5 it also
# returns when the engine is only stopped: then look again in a second.
flags=''
[ "${BASH_VERSINFO[0]}" -lt 5 ] || flags=-f
while :; do
	signalled=''
	# shellcheck disable=SC2086 # none is no argument
	wait $flags "$pid"
	status=$?
	kill -0 "$pid" 2>/dev/null || break
	[ -n "$signalled" ] || sleep 1
done
if [ -n "$signalled" ]; then # the status may be that of the signal; the engine's own is kept for another question
	wait "$pid" 2>/dev/null
	last=$?
	[ "$last" -eq 127 ] || status=$last
fi

if command -v "$kvlift" >/dev/null; then
	sweep --wait "${KVLIFT_SWEEP_WAIT:-5s}"
fi
exit "$status"
