// SPDX-License-Identifier: Apache-2.0

// Package testcage runs tests where a broken guard can do no harm. Code that deletes and overwrites whatever path it
// is given, as root, is tested with hostile paths: the day it is wrong, it must not be this machine that pays.
package testcage

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

const (
	key    = "TESTCAGE_DIR"
	locked = "TESTCAGE_LOCKED"
)

// Main runs the tests, by calling run, in a mount namespace in which everything is read-only but a temporary
// directory and, for fuzzing, its cache and the package's testdata. Without root there is no such namespace, and file
// permissions are the cage.
func Main(m *testing.M, run func(*testing.M)) {
	flag.Parse()
	if dir := os.Getenv(key); dir != "" {
		// What it starts in turn, as fuzzing does, is inside already.
		if os.Getenv(locked) == "" {
			if err := lock(dir); err != nil {
				fmt.Fprintln(os.Stderr, "testcage:", err)
				os.Exit(1)
			}
			_ = os.Setenv(locked, "1")
		}
		run(m)
		return
	}
	if os.Getuid() != 0 {
		run(m)
		return
	}
	os.Exit(inside())
}

// inside starts this test binary again in the cage and gives its exit code.
func inside() int {
	exe, err := os.Executable()
	if err != nil {
		fmt.Fprintln(os.Stderr, "testcage:", err)
		return 1
	}
	dir, err := os.MkdirTemp("", "cage")
	if err != nil {
		fmt.Fprintln(os.Stderr, "testcage:", err)
		return 1
	}
	defer os.Remove(dir)
	var args []string
	for _, arg := range os.Args[1:] {
		// Files that go test wants are written by the outer process, or not at all.
		if !strings.HasPrefix(arg, "-test.testlogfile") && !strings.HasPrefix(arg, "-test.coverprofile") &&
			!strings.HasPrefix(arg, "-test.gocoverdir") {
			args = append(args, arg)
		}
	}
	cmd := exec.Command(exe, args...)
	cmd.Env = append(os.Environ(), key+"="+dir, "TMPDIR="+dir)
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWNS}
	err = cmd.Run()
	var exit *exec.ExitError
	switch {
	case err == nil:
		return 0
	case errors.As(err, &exit):
		return max(1, exit.ExitCode())
	}
	fmt.Fprintln(os.Stderr, "testcage:", err)
	return 1
}

// lock makes everything read-only but dir, which becomes a file system of its own.
func lock(dir string) error {
	open := fuzzDirs()
	for _, path := range open {
		if err := unix.Mount(path, path, "", unix.MS_BIND, ""); err != nil {
			return fmt.Errorf("%s: %w", path, err)
		}
	}
	attr := unix.MountAttr{Attr_set: unix.MOUNT_ATTR_RDONLY, Propagation: unix.MS_PRIVATE}
	if err := unix.MountSetattr(unix.AT_FDCWD, "/", unix.AT_RECURSIVE, &attr); err != nil {
		return fmt.Errorf("making the machine read-only: %w", err)
	}
	for _, path := range open {
		if err := unix.MountSetattr(unix.AT_FDCWD, path, 0, &unix.MountAttr{Attr_clr: unix.MOUNT_ATTR_RDONLY}); err != nil {
			return fmt.Errorf("%s: %w", path, err)
		}
	}
	if err := unix.Mount("cage", dir, "tmpfs", 0, "mode=755"); err != nil {
		return fmt.Errorf("temporary directory: %w", err)
	}
	// A cage that is open would be worse than none: it would be trusted.
	for _, path := range []string{"/testcage", "/etc/testcage", "/tmp/testcage"} {
		if fd, err := unix.Open(path, unix.O_CREAT|unix.O_WRONLY|unix.O_CLOEXEC, 0o600); err == nil {
			_ = unix.Close(fd)
			_ = unix.Unlink(path)
			return fmt.Errorf("%s can be written", path)
		}
	}
	return nil
}

// fuzzDirs are those that fuzzing writes: what it found interesting, and what it found wrong.
func fuzzDirs() []string {
	if fuzz := flag.Lookup("test.fuzz"); fuzz == nil || fuzz.Value.String() == "" {
		return nil
	}
	var dirs []string
	for _, path := range []string{flag.Lookup("test.fuzzcachedir").Value.String(), "testdata"} {
		if info, err := os.Stat(path); path != "" && err == nil && info.IsDir() {
			dirs = append(dirs, path)
		}
	}
	return dirs
}
