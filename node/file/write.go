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
	"strings"
	"unsafe"

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
// leaves the old. fill may report that nothing changed, and then nothing does. With sync it returns when the disk has it.
func (p *place) write(want attributes, sync bool, fill func(io.Writer) (changed bool, err error)) error {
	if err := p.follow(); err != nil {
		return err
	}
	old, err := p.existing()
	if err != nil {
		return err
	}
	temp, f, err := p.temporary(old != nil)
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
	// The file by itself would read from a source directly, in whatever bites that gives: multipart's are of 4 KiB.
	out := bufio.NewWriterSize(struct{ io.Writer }{f}, bufferSize)
	changed, err := fill(out)
	if err == nil {
		err = out.Flush()
	}
	if err != nil || !changed {
		return err
	}
	keep, err = p.exchange(f, temp, old, want, sync)
	return err
}

// exchange puts a file that is complete, called temp in the same directory, in the place of the old one. It is
// renamed unless the old one must stay the file it is; then temp is left to the caller.
func (p *place) exchange(f *os.File, temp string, old *unix.Stat_t, want attributes, sync bool) (renamed bool, err error) {
	full := want.over(old)
	err = dress(int(f.Fd()), full)
	if err == unix.EPERM && old != nil && want.uid < 0 && want.gid < 0 {
		// Whoever may write the file but does not own it could not give the new one to its owner.
		return false, p.overwrite(f, full, sync)
	}
	if err != nil {
		return false, err
	}
	if sync {
		if err := f.Sync(); err != nil {
			return false, err
		}
	}
	if old != nil && !isReplacing(temp) {
		// A partial file: it gets a name that says so, and its own again if it cannot have the last one.
		partial := temp
		temp = temporaryName(true)
		if err := unix.Renameat(p.fd(), partial, p.fd(), temp); err != nil {
			return false, err
		}
		defer func() {
			if !renamed {
				_ = unix.Renameat(p.fd(), temp, p.fd(), partial)
			}
		}()
	}
	err = unix.Renameat(p.fd(), temp, p.fd(), p.name)
	if err == unix.EBUSY || err == unix.EXDEV {
		// The file is a mount point, like /etc/hosts in many containers: it can be filled but not exchanged.
		return false, p.overwrite(f, full, sync)
	}
	if err != nil || !sync {
		return err == nil, err
	}
	dir, err := openDir(p.fd(), ".") // a name is safe when its directory is
	if err != nil {
		return true, err
	}
	defer dir.Close()
	return true, dir.Sync()
}

// dress gives an open file its owner and mode. What it has already is not set: that may need a right.
func dress(fd int, want attributes) error {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return err
	}
	if want.uid == int(st.Uid) {
		want.uid = -1
	}
	if want.gid == int(st.Gid) {
		want.gid = -1
	}
	given := want.uid >= 0 || want.gid >= 0
	if given {
		// Owner first: changing it clears the set-id bits.
		if err := unix.Fchown(fd, want.uid, want.gid); err != nil {
			return err
		}
	}
	if want.mode < 0 || !given && uint32(want.mode) == st.Mode&0o7777 {
		return nil
	}
	return unix.Fchmod(fd, uint32(want.mode))
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

// existing looks at what would be replaced; nil when there is nothing. What may not be written is not replaced
// either, though whoever may write the directory could.
func (p *place) existing() (*unix.Stat_t, error) {
	fd, err := safefile.Openat(p.fd(), p.name, unix.O_PATH|unix.O_NOFOLLOW, 0)
	if errors.Is(err, fs.ErrNotExist) {
		if p.name == "." {
			return nil, unix.EISDIR
		}
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
	return st, p.checkWritable(fd)
}

// checkWritable asks with the thread's own rights over files. The library would, where it must guess, ask for others.
func (p *place) checkWritable(fd int) error {
	var empty [1]byte
	_, _, errno := unix.Syscall6(unix.SYS_FACCESSAT2, uintptr(fd), uintptr(unsafe.Pointer(&empty)), unix.W_OK, unix.AT_EACCESS|unix.AT_EMPTY_PATH, 0, 0)
	switch errno {
	case 0:
		return nil
	case unix.ENOSYS: // before Linux 5.8; not always so, because on an overlay it copies the file
		f, _, err := safefile.OpenRegular(p.fd(), p.name, unix.O_WRONLY|unix.O_NOFOLLOW)
		if err == nil {
			err = f.Close()
		}
		if err == unix.ETXTBSY {
			err = nil
		}
		return err
	}
	return errno
}

// temporary makes a file beside the target. The name cannot be guessed, and a file or link that is there already is
// never used.
func (p *place) temporary(replaces bool) (string, *os.File, error) {
	for {
		name := temporaryName(replaces)
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

const (
	temporaryPrefix = ".execd-"
	replacingPrefix = ".execd-over-"
)

// temporaryName says whether something is there that it will replace: the kernel does not tell that to those who watch,
// but it tells them what the name was before (see watcher.event).
func temporaryName(replaces bool) string {
	var b [8]byte
	_, _ = rand.Read(b[:]) // never fails
	prefix := temporaryPrefix
	if replaces {
		prefix = replacingPrefix
	}
	return prefix + hex.EncodeToString(b[:])
}

// isTemporary is true for a name that temporaryName or partialName could have made.
func isTemporary(name string) bool {
	if rest, found := strings.CutPrefix(name, partialPrefix); found {
		return isHex(rest, 12)
	}
	rest, found := strings.CutPrefix(name, temporaryPrefix)
	return found && isHex(rest, 8) || isReplacing(name)
}

// isReplacing is true for a name that says that it will replace something.
func isReplacing(name string) bool {
	rest, found := strings.CutPrefix(name, replacingPrefix)
	return found && isHex(rest, 8)
}

func isHex(text string, size int) bool {
	raw, err := hex.DecodeString(text)
	return err == nil && len(raw) == size
}

// overwrite fills the file in place from the temporary one.
func (p *place) overwrite(from *os.File, want attributes, sync bool) error {
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
	if sync {
		if err := to.Sync(); err != nil {
			return err
		}
	}
	return dress(int(to.Fd()), want)
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
