// SPDX-License-Identifier: Apache-2.0

// Package safefile opens paths that a hostile program may have prepared. The daemon shares its root directory with
// that program, so what must not happen is: following a magic link of /proc into the daemon's own descriptors, or
// waiting for ever on a FIFO or a device.
package safefile

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

var (
	// ErrNotRegular: neither a file nor, where one is wanted, a directory.
	ErrNotRegular = errors.New("not a regular file")
	// ErrProc: the path lies in procfs, where the daemon would see itself instead of what the caller means.
	ErrProc = errors.New("it lies in /proc")
	// ErrTooLarge: more bytes than the caller wants to hold.
	ErrTooLarge = errors.New("file too large")
)

// Openat opens path below the directory dir (or absolute, or unix.AT_FDCWD) without passing a magic link.
func Openat(dir int, path string, flags int, mode uint32) (int, error) {
	return openat(dir, path, flags, mode, unix.RESOLVE_NO_MAGICLINKS)
}

// OpenBeneath opens path, which cannot lead out of dir: not by .., not by being absolute, not through any link, also
// while somebody rearranges the tree. The last element may be a link only with O_PATH|O_NOFOLLOW, which opens the
// link itself.
func OpenBeneath(dir int, path string, flags int, mode uint32) (int, error) {
	return openat(dir, path, flags, mode, unix.RESOLVE_BENEATH|unix.RESOLVE_NO_SYMLINKS|unix.RESOLVE_NO_MAGICLINKS)
}

func openat(dir int, path string, flags int, mode uint32, resolve uint64) (int, error) {
	how := unix.OpenHow{Flags: uint64(flags) | unix.O_CLOEXEC, Resolve: resolve}
	if flags&(unix.O_CREAT|unix.O_TMPFILE) != 0 {
		how.Mode = uint64(mode)
	}
	if flags&unix.O_PATH == 0 {
		how.Flags |= unix.O_NOCTTY | unix.O_NONBLOCK
	}
	for {
		fd, err := unix.Openat2(dir, path, &how)
		// EAGAIN: a rename elsewhere made the kernel unsure where it is. Of other files it can mean that they would block.
		if err == unix.EINTR || err == unix.EAGAIN && flags&(unix.O_PATH|unix.O_DIRECTORY) != 0 {
			continue
		}
		return fd, err
	}
}

// OpenRegular opens an existing regular file outside of procfs. It looks before it opens, because opening alone can
// have an effect on a device, and looks again afterwards, because the path may have changed in between.
func OpenRegular(dir int, path string, flags int) (*os.File, *unix.Stat_t, error) {
	look, err := Openat(dir, path, unix.O_PATH|flags&unix.O_NOFOLLOW, 0)
	if err != nil {
		return nil, nil, err
	}
	err = CheckRegular(look, nil)
	_ = unix.Close(look)
	if err != nil {
		return nil, nil, err
	}
	fd, err := Openat(dir, path, flags, 0)
	if err != nil {
		return nil, nil, err
	}
	st := new(unix.Stat_t)
	if err := CheckRegular(fd, st); err != nil {
		_ = unix.Close(fd)
		return nil, nil, err
	}
	// A regular file is always ready, so the runtime's poller refuses it and reads block as usual.
	return os.NewFile(uintptr(fd), path), st, nil
}

// CheckRegular fails unless fd is a regular file outside of procfs; it fills st when given.
func CheckRegular(fd int, st *unix.Stat_t) error {
	if st == nil {
		st = new(unix.Stat_t)
	}
	if err := unix.Fstat(fd, st); err != nil {
		return err
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG {
		return fmt.Errorf("%w but %s", ErrNotRegular, KindName(st.Mode))
	}
	return CheckNotProc(fd)
}

// CheckNotProc fails when fd lies in procfs.
func CheckNotProc(fd int) error {
	var fs unix.Statfs_t
	if err := unix.Fstatfs(fd, &fs); err != nil {
		return err
	}
	if fs.Type == unix.PROC_SUPER_MAGIC {
		return ErrProc
	}
	return nil
}

// KindName says in words what kind of file a mode means.
func KindName(mode uint32) string {
	switch mode & unix.S_IFMT {
	case unix.S_IFREG:
		return "a regular file"
	case unix.S_IFDIR:
		return "a directory"
	case unix.S_IFLNK:
		return "a symbolic link"
	case unix.S_IFIFO:
		return "a FIFO"
	case unix.S_IFSOCK:
		return "a socket"
	case unix.S_IFCHR, unix.S_IFBLK:
		return "a device"
	}
	return "of an unknown kind"
}

// OpenDir opens a directory for use as a starting point or a working directory.
func OpenDir(path string) (*os.File, error) {
	fd, err := Openat(unix.AT_FDCWD, path, unix.O_PATH|unix.O_DIRECTORY, 0)
	if err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(fd), path), nil
}

// Read reads a small regular file.
func Read(path string, limit int64) ([]byte, error) {
	f, st, err := OpenRegular(unix.AT_FDCWD, path, unix.O_RDONLY)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	if st.Size > limit {
		return nil, ErrTooLarge
	}
	data, err := io.ReadAll(io.LimitReader(f, limit+1))
	if err == nil && int64(len(data)) > limit {
		err = ErrTooLarge
	}
	return data, err
}

// MakeDir makes a directory and those above it that do not exist, and opens it.
func MakeDir(path string) (*os.File, error) {
	dir, err := OpenDir(path)
	if !errors.Is(err, unix.ENOENT) {
		return dir, err
	}
	path = filepath.Clean(path)
	if path == "/" || path == "." {
		return nil, err
	}
	parent, err := MakeDir(filepath.Dir(path))
	if err != nil {
		return nil, err
	}
	defer parent.Close()
	if err := unix.Mkdirat(int(parent.Fd()), filepath.Base(path), 0o755); err != nil && err != unix.EEXIST {
		return nil, err
	}
	fd, err := Openat(int(parent.Fd()), filepath.Base(path), unix.O_PATH|unix.O_DIRECTORY, 0)
	if err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(fd), path), nil
}
