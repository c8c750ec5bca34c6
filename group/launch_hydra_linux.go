package group

import (
	"bytes"
	"fmt"
	"os"
	"strconv"

	"golang.org/x/sys/unix"
)

// hydraDaemon names the daemon of mpiexec on this host, which has started this process: by its process and when that began, so that no other daemon of
// this boot has the name. It returns "" if that cannot be known.
//
// Hydra puts no id of the job into the environment. What it does put there is the descriptor of a socket that the daemon has made, and the system
// says who made it, whichever programs are between the daemon and this process.
func hydraDaemon(socket string) string {
	fd, err := strconv.Atoi(socket)
	if err != nil || fd < 0 {
		return ""
	}
	maker, err := unix.GetsockoptUcred(fd, unix.SOL_SOCKET, unix.SO_PEERCRED)
	if err != nil || maker.Pid <= 0 || int(maker.Pid) == os.Getpid() || int(maker.Uid) != os.Geteuid() {
		return "" // no such socket, a daemon outside of this container, or a descriptor that means something else here
	}
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", maker.Pid))
	if err != nil {
		return ""
	}
	// The second field, the name, may hold anything and ends at the last parenthesis; the 22nd is when the process began.
	fields := bytes.Fields(stat[bytes.LastIndexByte(stat, ')')+1:])
	const began = 22 - 3
	if len(fields) <= began {
		return ""
	}
	return fmt.Sprintf("hydra-%d-%s", maker.Pid, fields[began])
}
