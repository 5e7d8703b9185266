// SPDX-License-Identifier: Apache-2.0

package file

import (
	"strconv"
	"time"

	"golang.org/x/sys/unix"

	"opensandbox.io/node/account"
	"opensandbox.io/node/reply"
	"opensandbox.io/node/wire"
)

// describe gives what is known of a name in a directory, without following it.
func describe(dir int, name, path string, book *account.Book) (wire.FileInfo, error) {
	var st unix.Statx_t
	err := unix.Statx(dir, name, unix.AT_SYMLINK_NOFOLLOW|unix.AT_NO_AUTOMOUNT, unix.STATX_BASIC_STATS|unix.STATX_BTIME, &st)
	if err != nil {
		return wire.FileInfo{}, err
	}
	born := st.Ctime
	if st.Mask&unix.STATX_BTIME != 0 {
		born = st.Btime
	}
	return wire.FileInfo{
		Path: escape(path), Type: kind(st.Mode), Size: int64(st.Size),
		ModifiedAt: when(st.Mtime), CreatedAt: when(born),
		Owner: asGiven(book.UserName(st.Uid)), Group: asGiven(book.GroupName(st.Gid)), Mode: digits(uint32(st.Mode)),
	}, nil
}

func when(t unix.StatxTimestamp) time.Time {
	at := time.Unix(t.Sec, int64(t.Nsec)).UTC()
	// A program can set any time; JSON has no year above 9999.
	if y := at.Year(); y < 1 || y > 9999 {
		return time.Unix(0, 0).UTC()
	}
	return at
}

func kind(mode uint16) wire.FileInfoType {
	switch mode & unix.S_IFMT {
	case unix.S_IFREG:
		return wire.FileInfoTypeFile
	case unix.S_IFDIR:
		return wire.FileInfoTypeDirectory
	case unix.S_IFLNK:
		return wire.FileInfoTypeSymlink
	}
	return wire.FileInfoTypeOther
}

// digits writes a mode as the published contract does: octal digits in a decimal number.
func digits(mode uint32) int {
	n, _ := strconv.Atoi(strconv.FormatUint(uint64(mode&0o7777), 8))
	return n
}

// modeOf reads such a number back.
func modeOf(digits int, code wire.Code) (uint32, error) {
	n, err := strconv.ParseUint(strconv.Itoa(digits), 8, 32)
	if err != nil || n > 0o7777 {
		return 0, reply.Errorf(code, "mode %d is not a file mode.", digits).WithHint("Write the octal digits as a number: 644 for rw-r--r--.")
	}
	return uint32(n), nil
}

// owners resolves user and group names; -1 leaves one as it is.
func owners(owner, group *string, code wire.Code) (uid, gid int, err error) {
	uid, gid = -1, -1
	if owner == nil && group == nil {
		return uid, gid, nil
	}
	book := account.Read()
	if owner != nil && *owner != "" {
		id, ok := book.UID(*owner)
		if !ok {
			return 0, 0, reply.Errorf(code, "There is no user %q in the sandbox.", *owner)
		}
		uid = int(id)
	}
	if group != nil && *group != "" {
		id, ok := book.GID(*group)
		if !ok {
			return 0, 0, reply.Errorf(code, "There is no group %q in the sandbox.", *group)
		}
		gid = int(id)
	}
	return uid, gid, nil
}
