// SPDX-License-Identifier: Apache-2.0

package file

import (
	"context"
	"errors"
	"io"
	"os"

	"golang.org/x/sys/unix"

	"opensandbox.io/node/safefile"
)

// transfer moves where the kernel cannot rename: it copies and then deletes. A copy that fails is taken away again,
// so that the source is whole either way.
func transfer(ctx context.Context, src, dest *place) error {
	if dest.exists() {
		return unix.EEXIST
	}
	if err := copyTree(ctx, src.fd(), src.name, dest.fd(), dest.name, 1); err != nil {
		_ = removeAll(context.WithoutCancel(ctx), dest.fd(), dest.name, 1)
		return err
	}
	return removeAll(ctx, src.fd(), src.name, 1)
}

func copyTree(ctx context.Context, from int, fromName string, to int, toName string, level int) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	if level > deepest {
		return errTooDeep
	}
	var st unix.Stat_t
	if err := unix.Fstatat(from, fromName, &st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return err
	}
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFREG:
		return copyFile(from, fromName, to, toName)
	case unix.S_IFLNK:
		buf := make([]byte, unix.PathMax)
		n, err := unix.Readlinkat(from, fromName, buf)
		if err != nil {
			return err
		}
		if err := unix.Symlinkat(string(buf[:n]), to, toName); err != nil {
			return err
		}
		return unix.Fchownat(to, toName, int(st.Uid), int(st.Gid), unix.AT_SYMLINK_NOFOLLOW)
	case unix.S_IFDIR:
		return copyDir(ctx, from, fromName, to, toName, level)
	}
	return safefile.ErrNotRegular
}

func copyDir(ctx context.Context, from int, fromName string, to int, toName string, level int) error {
	src, err := openDir(from, fromName)
	if err != nil {
		return err
	}
	defer src.Close()
	if err := safefile.CheckNotProc(int(src.Fd())); err != nil {
		return err
	}
	if err := unix.Mkdirat(to, toName, 0o700); err != nil {
		return err
	}
	dest, err := openDir(to, toName)
	if err != nil {
		return err
	}
	defer dest.Close()
	for {
		names, err := src.Readdirnames(1024)
		for _, name := range names {
			if err := copyTree(ctx, int(src.Fd()), name, int(dest.Fd()), name, level+1); err != nil {
				return err
			}
		}
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return err
		}
	}
	return copyAttributes(src, dest)
}

func copyFile(from int, fromName string, to int, toName string) error {
	src, _, err := safefile.OpenRegular(from, fromName, unix.O_RDONLY|unix.O_NOFOLLOW)
	if err != nil {
		return err
	}
	defer src.Close()
	fd, err := safefile.Openat(to, toName, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return err
	}
	dest := os.NewFile(uintptr(fd), toName)
	defer dest.Close()
	if _, err := io.Copy(dest, src); err != nil {
		return err
	}
	return copyAttributes(src, dest)
}

// copyAttributes gives a copy the owner, mode and times of what it was made from.
func copyAttributes(src, dest *os.File) error {
	var st unix.Stat_t
	if err := unix.Fstat(int(src.Fd()), &st); err != nil {
		return err
	}
	fd := int(dest.Fd())
	if err := unix.Fchown(fd, int(st.Uid), int(st.Gid)); err != nil {
		return err
	}
	if err := unix.Fchmod(fd, st.Mode&0o7777); err != nil {
		return err
	}
	return unix.Futimes(fd, []unix.Timeval{
		unix.NsecToTimeval(unix.TimespecToNsec(st.Atim)), unix.NsecToTimeval(unix.TimespecToNsec(st.Mtim)),
	})
}
