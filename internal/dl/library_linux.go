//go:build amd64 || arm64

package dl

import (
	"bufio"
	"fmt"
	"os"
	"runtime"
	"strconv"
	"strings"

	"github.com/ebitengine/purego"
)

// open asks the loader for path. All symbols are resolved at once, so that a library that lacks one fails here and not during a call.
func open(path string, global bool) (uintptr, error) {
	mode := purego.RTLD_NOW | purego.RTLD_LOCAL
	if global {
		mode = purego.RTLD_NOW | purego.RTLD_GLOBAL
	}
	// A second call asks what failed, and the loader keeps that for each thread.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	return purego.Dlopen(path, mode)
}

// symbol returns the address of a symbol.
func symbol(handle uintptr, name string) (uintptr, error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	return purego.Dlsym(handle, name)
}

// register makes *fn call p. A type that cannot be passed to C is an error.
func register(fn any, p uintptr, name string) (err error) {
	defer func() {
		if v := recover(); v != nil {
			err = fmt.Errorf("binding %s as %T: %v", name, fn, v)
		}
	}()
	purego.RegisterFunc(fn, p)
	return nil
}

// mappedFile returns the file that is mapped at p.
func mappedFile(p uintptr) (string, error) {
	f, err := os.Open("/proc/self/maps")
	if err != nil {
		return "", fmt.Errorf("looking up a mapped file: %w", err)
	}
	defer f.Close()
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		// 7f0e4c000000-7f0e4c021000 r-xp 00000000 08:01 131 /usr/lib/libcuda.so.580.159.04
		fields := strings.Fields(lines.Text())
		if len(fields) < 6 {
			continue
		}
		from, to, _ := strings.Cut(fields[0], "-")
		low, err := strconv.ParseUint(from, 16, 64)
		if err != nil {
			continue
		}
		high, err := strconv.ParseUint(to, 16, 64)
		if err == nil && low <= uint64(p) && uint64(p) < high {
			return strings.Join(fields[5:], " "), nil
		}
	}
	if err := lines.Err(); err != nil {
		return "", fmt.Errorf("looking up a mapped file: %w", err)
	}
	return "", fmt.Errorf("no file is mapped at 0x%x", p)
}
