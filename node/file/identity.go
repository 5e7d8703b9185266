// SPDX-License-Identifier: Apache-2.0

package file

import (
	"maps"
	"net/http"
	"os"
	"slices"
	"strconv"
	"unsafe"

	"golang.org/x/sys/unix"

	"opensandbox.io/node/account"
	"opensandbox.io/node/reply"
	"opensandbox.io/node/thread"
	"opensandbox.io/node/wire"
)

// identityPrefix comes before each route that is to be done as another user.
const identityPrefix = "/v1/filesystem/{uid}/{gid}"

// identity is whose rights count for an operation.
type identity struct {
	uid, gid uint32
	groups   []uint32 // supplementary
}

func identityOf(r *http.Request, book *account.Book) (id identity, err error) {
	for name, to := range map[string]*uint32{"uid": &id.uid, "gid": &id.gid} {
		n, err := strconv.ParseUint(r.PathValue(name), 10, 32)
		if err != nil || n == 1<<32-1 { // the last one means "leave it" to the kernel
			return id, reply.Errorf(wire.CodeInvalidQuery, "%s must be a number, not %q.", name, r.PathValue(name)).
				WithHint("Write /v1/filesystem/1000/1000/files/… with the numbers of a user and a group.")
		}
		*to = uint32(n)
	}
	if u, ok := book.User(id.uid); ok {
		id.groups = book.Groups(u)
	}
	return id, nil
}

// as runs a handler with the rights of the user that the path names. Those belong to a thread: the handler gets one of
// its own and must do all work on files in its own goroutine. The thread dies with it, so that nothing that was
// changed can ever be used by anybody else.
func (a *API) as(handle handler, w http.ResponseWriter, r *http.Request) error {
	book := account.Read()
	id, err := identityOf(r, book)
	if err != nil {
		return err
	}
	own := *a
	own.uid, own.root = id.uid, a.root && id.uid == 0
	if u, ok := book.User(id.uid); ok && u.Home != "" {
		own.env = maps.Clone(a.env)
		own.env["HOME"] = u.Home
	}
	type outcome struct{ panicked any }
	out, err := thread.Run(func() (out outcome, clean bool, err error) {
		if err := id.assume(); err != nil {
			return out, false, err
		}
		// A panic goes on in the server's goroutine, which knows what to do with it.
		defer func() { out.panicked = recover() }()
		return out, false, handle(&own, w, r)
	})
	if out.panicked != nil {
		panic(out.panicked)
	}
	return err
}

// assume makes the calling thread's work on files that of the user, for good. The thread's own user stays: programs
// of that user can neither signal nor trace it.
func (id identity) assume() error {
	if id.uid == uint32(os.Geteuid()) && id.gid == uint32(os.Getegid()) {
		return nil // as the daemon itself, which also works where nobody can become anybody
	}
	if err := setGroups(id.groups); err != nil {
		return id.refused("groups", err)
	}
	// Both calls say who it was before, never whether they worked.
	_, _, _ = unix.RawSyscall(unix.SYS_SETFSGID, uintptr(id.gid), 0, 0)
	if now, _, _ := unix.RawSyscall(unix.SYS_SETFSGID, ^uintptr(0), 0, 0); uint32(now) != id.gid {
		return id.refused("group", unix.EPERM)
	}
	_, _, _ = unix.RawSyscall(unix.SYS_SETFSUID, uintptr(id.uid), 0, 0)
	if now, _, _ := unix.RawSyscall(unix.SYS_SETFSUID, ^uintptr(0), 0, 0); uint32(now) != id.uid {
		return id.refused("user", unix.EPERM)
	}
	if id.uid == 0 {
		return nil
	}
	// The kernel took the rights over files from the effective set; here the rest goes too, and what could bring them back.
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var none [2]unix.CapUserData
	if err := unix.Capset(&header, &none[0]); err != nil {
		return id.refused("capabilities", err)
	}
	return nil
}

// setGroups sets those of the calling thread. The library's way would change all threads.
func setGroups(groups []uint32) error {
	had, err := unix.Getgroups()
	if err != nil {
		return err
	}
	if slices.EqualFunc(had, groups, func(a int, b uint32) bool { return uint32(a) == b }) {
		return nil // also where a user namespace does not allow the call
	}
	var first unsafe.Pointer
	if len(groups) > 0 {
		first = unsafe.Pointer(&groups[0])
	}
	if _, _, errno := unix.RawSyscall(unix.SYS_SETGROUPS, uintptr(len(groups)), uintptr(first), 0); errno != 0 {
		return errno
	}
	return nil
}

func (id identity) refused(what string, err error) error {
	return reply.Errorf(wire.CodeNotSupported, "Files cannot be worked on as %d:%d here: %s: %v.", id.uid, id.gid, what, err).
		WithHint("The sandbox has no such user on this machine; leave /v1/filesystem/… away to work as its root user.")
}
