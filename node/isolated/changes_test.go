// SPDX-License-Identifier: Apache-2.0

package isolated

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

// Between the look at a directory and its opening somebody puts a link there: it is not followed, also not out of the
// tree by a name of more than one part.
func TestDirectoriesAreOpenedWithoutLinks(t *testing.T) {
	dir := t.TempDir()
	if err := errors.Join(os.Mkdir(filepath.Join(dir, "real"), 0o755), os.Symlink("real", filepath.Join(dir, "link")), os.Symlink("/etc", filepath.Join(dir, "away"))); err != nil {
		t.Fatal(err)
	}
	at, err := unix.Open(dir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(at)
	for name, ok := range map[string]bool{"real": true, "link": false, "away": false, "..": false, "real/../..": false, "/etc": false} {
		fd, err := openDir(at, name)
		if (err == nil) != ok {
			t.Errorf("%s: %v", name, err)
		}
		if err == nil {
			_ = unix.Close(fd)
		}
	}
}

// A program that nests directories without end gets an answer, and execd keeps its descriptors.
func TestDepthIsBounded(t *testing.T) {
	upper, err := os.Open(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	defer upper.Close()
	at := int(upper.Fd())
	for range depthMax + 2 {
		if err := unix.Mkdirat(at, "d", 0o755); err != nil {
			t.Fatal(err)
		}
		next, err := openDir(at, "d")
		if err != nil {
			t.Fatal(err)
		}
		if at != int(upper.Fd()) {
			_ = unix.Close(at)
		}
		at = next
	}
	_ = unix.Close(at)
	if err := walk(int(upper.Fd()), -1, "/", 0, false, func(*entry) error { return nil }); err == nil {
		t.Error("no end")
	}
}
