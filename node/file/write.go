// SPDX-License-Identifier: Apache-2.0

package file

import (
	"bufio"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"io"
	"io/fs"
	"os"

	"golang.org/x/sys/unix"

	"opensandbox.io/node/safefile"
)

const bufferSize = 256 << 10

// attributes of a file that is written; -1 keeps what is there or, for a new file, what is usual.
type attributes struct {
	mode     int // permission bits
	uid, gid int
}

// write replaces the contents of a file at once: readers see the old or the new, and whoever stops in the middle
// leaves the old. fill may report that nothing changed, and then nothing does.
func (p *place) write(want attributes, fill func(io.Writer) (changed bool, err error)) error {
	if err := p.follow(); err != nil {
		return err
	}
	old, err := p.existing()
	if err != nil {
		return err
	}
	if old == nil && p.name == "." {
		return unix.EISDIR
	}
	temp, f, err := p.temporary()
	if err != nil {
		return err
	}
	keep := false
	defer func() {
		_ = f.Close()
		if !keep {
			_ = unix.Unlinkat(p.fd(), temp, 0)
		}
	}()
	out := bufio.NewWriterSize(f, bufferSize)
	changed, err := fill(out)
	if err == nil {
		err = out.Flush()
	}
	if err != nil || !changed {
		return err
	}
	want = want.over(old)
	// Owner first: changing it clears the set-id bits.
	if err := unix.Fchown(int(f.Fd()), want.uid, want.gid); err != nil {
		return err
	}
	if err := unix.Fchmod(int(f.Fd()), uint32(want.mode)); err != nil {
		return err
	}
	err = unix.Renameat(p.fd(), temp, p.fd(), p.name)
	if err == unix.EBUSY || err == unix.EXDEV {
		// The file is a mount point, like /etc/hosts in many containers: it can be filled but not exchanged.
		return p.overwrite(f, want)
	}
	keep = err == nil
	return err
}

// over fills in what the old file had, or what a new one gets.
func (a attributes) over(old *unix.Stat_t) attributes {
	if old != nil {
		if a.mode < 0 {
			a.mode = int(old.Mode & 0o7777)
		}
		if a.uid < 0 {
			a.uid = int(old.Uid)
		}
		if a.gid < 0 {
			a.gid = int(old.Gid)
		}
	}
	if a.mode < 0 {
		a.mode = 0o644
	}
	return a
}

// existing looks at what would be replaced; nil when there is nothing.
func (p *place) existing() (*unix.Stat_t, error) {
	fd, err := safefile.Openat(p.fd(), p.name, unix.O_PATH|unix.O_NOFOLLOW, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	defer unix.Close(fd)
	st := new(unix.Stat_t)
	if err := safefile.CheckRegular(fd, st); err != nil {
		return nil, err
	}
	return st, nil
}

// temporary makes a file beside the target. The name cannot be guessed, and a file or link that is there already is
// never used.
func (p *place) temporary() (string, *os.File, error) {
	for {
		var b [8]byte
		_, _ = rand.Read(b[:]) // never fails
		name := ".execd-" + hex.EncodeToString(b[:])
		fd, err := safefile.Openat(p.fd(), name, unix.O_RDWR|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW, 0o600)
		if err == unix.EEXIST {
			continue
		}
		if err != nil {
			return "", nil, err
		}
		return name, os.NewFile(uintptr(fd), name), nil
	}
}

// overwrite fills the file in place from the temporary one.
func (p *place) overwrite(from *os.File, want attributes) error {
	to, _, err := safefile.OpenRegular(p.fd(), p.name, unix.O_WRONLY|unix.O_NOFOLLOW)
	if err != nil {
		return err
	}
	defer to.Close()
	if _, err := from.Seek(0, io.SeekStart); err != nil {
		return err
	}
	if err := to.Truncate(0); err != nil {
		return err
	}
	if _, err := io.Copy(to, from); err != nil {
		return err
	}
	if err := unix.Fchown(int(to.Fd()), want.uid, want.gid); err != nil {
		return err
	}
	return unix.Fchmod(int(to.Fd()), uint32(want.mode))
}

// change sets owner and mode of what a path leads to; -1 leaves them.
func (p *place) change(want attributes) error {
	if err := p.follow(); err != nil {
		return err
	}
	if want.uid >= 0 || want.gid >= 0 {
		if err := unix.Fchownat(p.fd(), p.name, want.uid, want.gid, unix.AT_SYMLINK_NOFOLLOW); err != nil {
			return err
		}
	}
	if want.mode < 0 {
		return nil
	}
	err := unix.Fchmodat(p.fd(), p.name, uint32(want.mode), unix.AT_SYMLINK_NOFOLLOW)
	if err != unix.ENOSYS && err != unix.EOPNOTSUPP {
		return err
	}
	// Before Linux 6.6 a mode can only be set without following through an open file.
	var st unix.Stat_t
	if err := unix.Fstatat(p.fd(), p.name, &st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return err
	}
	if k := st.Mode & unix.S_IFMT; k != unix.S_IFREG && k != unix.S_IFDIR {
		return safefile.ErrNotRegular
	}
	fd, err := safefile.Openat(p.fd(), p.name, unix.O_RDONLY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	return unix.Fchmod(fd, uint32(want.mode))
}
