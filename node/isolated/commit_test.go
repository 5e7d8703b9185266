// SPDX-License-Identifier: Apache-2.0

package isolated

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

// Another program that writes to the directory has put something else under the temporary name: its owner and mode stay
// as they are, and those of what it leads to.
func TestWhatWasExchangedIsNotGivenAway(t *testing.T) {
	dir := t.TempDir()
	at, err := unix.Open(dir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(at)
	in := func(name string) string { return filepath.Join(dir, name) }
	if err := errors.Join(
		os.WriteFile(in("file"), nil, 0o600), unix.Mkfifo(in("fifo"), 0o600), os.Symlink("file", in("to file")), os.Symlink("fifo", in("to fifo")),
		os.Link(in("fifo"), in("second fifo")), os.Link(in("file"), in("second file")),
	); err != nil {
		t.Fatal(err)
	}
	for _, planted := range []struct {
		name string
		kind uint32
	}{
		{"to file", unix.S_IFIFO}, {"to fifo", unix.S_IFIFO}, {"file", unix.S_IFIFO}, {"second fifo", unix.S_IFIFO}, {"second file", unix.S_IFLNK},
	} {
		e := &entry{lower: at, st: unix.Stat_t{Mode: planted.kind | 0o666, Uid: 12345, Gid: 12345}}
		if err := e.handOver(planted.name); err == nil {
			t.Errorf("%s was given away", planted.name)
		}
	}
	for _, name := range []string{"file", "fifo", "to file", "to fifo"} {
		var st unix.Stat_t
		if err := unix.Lstat(in(name), &st); err != nil || int(st.Uid) != os.Geteuid() || st.Mode&unix.S_IFMT != unix.S_IFLNK && st.Mode&0o777 != 0o600 {
			t.Errorf("%s: %v, user %d, mode %o", name, err, st.Uid, st.Mode)
		}
	}
	// What is as it was made gets both, whatever the umask is.
	if err := unix.Mkfifo(in("own"), 0o600); err != nil {
		t.Fatal(err)
	}
	e := &entry{lower: at, st: unix.Stat_t{Mode: unix.S_IFIFO | 0o666, Uid: uint32(os.Geteuid()), Gid: uint32(os.Getegid())}}
	var st unix.Stat_t
	if err := errors.Join(e.handOver("own"), unix.Lstat(in("own"), &st)); err != nil || st.Mode&0o777 != 0o666 {
		t.Errorf("%v, mode %o", err, st.Mode)
	}
}

// A commit keeps holes, copies no more than a session can hold, and stops when nobody waits for it.
func TestCommitOfASparseFile(t *testing.T) {
	const size = 256 << 20
	s, upper, lower := layered(t, 1<<20)
	sparse(t, filepath.Join(upper, "f"), size)
	gone, leave := context.WithCancel(t.Context())
	leave()
	for name, c := range map[string]*committer{"small": {ctx: t.Context(), bytes: 1}, "gone": {ctx: gone, bytes: 1 << 20}} {
		if err := s.eachChange(t.Context(), c.apply); err == nil {
			t.Errorf("%s: it was committed", name)
		}
		if left, err := os.ReadDir(lower); err != nil || len(left) > 0 {
			t.Errorf("%s: %v %v is left", name, err, left)
		}
	}
	c := &committer{ctx: t.Context(), bytes: 1 << 20}
	if err := s.eachChange(t.Context(), c.apply); err != nil || c.done.Created != 1 {
		t.Fatalf("%v %+v", err, c.done)
	}
	f, err := os.Open(filepath.Join(lower, "f"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	var st unix.Stat_t
	text := make([]byte, 6)
	if _, err := f.ReadAt(text, size/2); err != nil || string(text) != "middle" {
		t.Errorf("%v %q", err, text)
	}
	if err := unix.Fstat(int(f.Fd()), &st); err != nil || st.Size != size || st.Blocks*512 > 1<<20 {
		t.Errorf("%v, size %d, %d blocks", err, st.Size, st.Blocks)
	}
}
