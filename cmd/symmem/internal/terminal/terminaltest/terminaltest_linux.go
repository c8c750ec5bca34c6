// Package terminaltest opens terminals for tests.
package terminaltest

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// Open opens a terminal with that many columns. written closes it and returns everything that was written to it; a test calls it once.
func Open(t *testing.T, columns uint16) (tty *os.File, written func() string) {
	t.Helper()
	master, tty := Pair(t, columns)
	var out bytes.Buffer
	var done sync.WaitGroup
	done.Go(func() { _, _ = io.Copy(&out, master) }) // it ends with an error when the terminal is closed
	return tty, func() string {
		require.NoError(t, tty.Close())
		done.Wait()
		require.NoError(t, master.Close())
		return out.String()
	}
}

// Pair opens a terminal with that many columns, and what its user has in hand: what is written to master is typed, and master reads what is shown.
func Pair(t *testing.T, columns uint16) (master, tty *os.File) {
	t.Helper()
	master, err := os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY, 0)
	require.NoError(t, err)
	fd := int(master.Fd())
	require.NoError(t, unix.IoctlSetPointerInt(fd, unix.TIOCSPTLCK, 0))
	number, err := unix.IoctlGetInt(fd, unix.TIOCGPTN)
	require.NoError(t, err)
	tty, err = os.OpenFile(fmt.Sprintf("/dev/pts/%d", number), os.O_RDWR|unix.O_NOCTTY, 0)
	require.NoError(t, err)
	require.NoError(t, unix.IoctlSetWinsize(int(tty.Fd()), unix.TIOCSWINSZ, &unix.Winsize{Row: 24, Col: columns}))
	return master, tty
}
