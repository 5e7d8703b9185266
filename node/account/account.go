// SPDX-License-Identifier: Apache-2.0

// Package account looks up users and groups in the sandbox's own /etc/passwd and /etc/group. os/user would do, but
// it opens whatever lies there, and a FIFO would stop the daemon for good.
package account

import (
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"opensandbox.io/node/safefile"
)

const limit = 4 << 20 // of either file; more is not a user database

// User is one line of /etc/passwd.
type User struct {
	Name     string
	UID, GID uint32
	Home     string
}

// Book is the user database as it was when it was read.
type Book struct {
	byUID   map[uint32]*User
	byName  map[string]*User
	groups  map[string]uint32
	byGID   map[uint32]string
	members map[string][]uint32 // user name to the groups that list it
}

// User finds a user by id.
func (b *Book) User(uid uint32) (*User, bool) { u, ok := b.byUID[uid]; return u, ok }

// UserName is the name of a user, or the number where there is none.
func (b *Book) UserName(uid uint32) string {
	if u, ok := b.byUID[uid]; ok {
		return u.Name
	}
	return strconv.FormatUint(uint64(uid), 10)
}

// GroupName is the name of a group, or the number where there is none.
func (b *Book) GroupName(gid uint32) string {
	if n, ok := b.byGID[gid]; ok {
		return n
	}
	return strconv.FormatUint(uint64(gid), 10)
}

// UID resolves a name or a number.
func (b *Book) UID(name string) (uint32, bool) {
	if u, ok := b.byName[name]; ok {
		return u.UID, true
	}
	return number(name)
}

// GID resolves a name or a number.
func (b *Book) GID(name string) (uint32, bool) {
	if g, ok := b.groups[name]; ok {
		return g, true
	}
	return number(name)
}

// Groups gives the supplementary groups of a user, without the primary one.
func (b *Book) Groups(u *User) []uint32 {
	var out []uint32
	for _, g := range b.members[u.Name] {
		if g != u.GID {
			out = append(out, g)
		}
	}
	return out
}

func number(s string) (uint32, bool) {
	n, err := strconv.ParseUint(s, 10, 32)
	return uint32(n), err == nil && n < 1<<32-1 // the last one means "leave it" to the kernel
}

var cache struct {
	sync.Mutex
	passwd, group stamp
	book          *Book
}

// stamp tells whether a file is still the one that was read.
type stamp struct {
	dev, ino     uint64
	size         int64
	mtime, ctime unix.Timespec
}

// Read gives the current database. What cannot be read counts as empty: numbers still work.
func Read() *Book {
	cache.Lock()
	defer cache.Unlock()
	p, g := stampOf("/etc/passwd"), stampOf("/etc/group")
	if cache.book != nil && p == cache.passwd && g == cache.group && settled(p) && settled(g) {
		return cache.book
	}
	passwd, err1 := safefile.Read("/etc/passwd", limit)
	group, err2 := safefile.Read("/etc/group", limit)
	book := Parse(string(passwd), string(group))
	if err1 == nil && err2 == nil { // a failure may pass
		cache.book, cache.passwd, cache.group = book, p, g
	}
	return book
}

// settled is false for a file changed so recently that a second change might not move its time stamp.
func settled(s stamp) bool {
	return time.Since(time.Unix(s.ctime.Unix())) > 100*time.Millisecond
}

func stampOf(path string) stamp {
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil && !os.IsNotExist(err) {
		return stamp{}
	}
	return stamp{uint64(st.Dev), st.Ino, st.Size, st.Mtim, st.Ctim}
}

// Parse reads the text of passwd and group; lines that make no sense are skipped, first lines win.
func Parse(passwd, group string) *Book {
	b := &Book{
		byUID: map[uint32]*User{}, byName: map[string]*User{}, groups: map[string]uint32{},
		byGID: map[uint32]string{}, members: map[string][]uint32{},
	}
	for line := range strings.Lines(passwd) {
		f := strings.Split(strings.TrimSuffix(line, "\n"), ":")
		if len(f) < 6 || f[0] == "" {
			continue
		}
		uid, ok1 := number(f[2])
		gid, ok2 := number(f[3])
		if !ok1 || !ok2 {
			continue
		}
		u := &User{Name: f[0], UID: uid, GID: gid, Home: f[5]}
		if _, ok := b.byUID[uid]; !ok {
			b.byUID[uid] = u
		}
		if _, ok := b.byName[u.Name]; !ok {
			b.byName[u.Name] = u
		}
	}
	for line := range strings.Lines(group) {
		f := strings.Split(strings.TrimSuffix(line, "\n"), ":")
		if len(f) < 4 || f[0] == "" {
			continue
		}
		gid, ok := number(f[2])
		if !ok {
			continue
		}
		if _, ok := b.groups[f[0]]; !ok {
			b.groups[f[0]] = gid
		}
		if _, ok := b.byGID[gid]; !ok {
			b.byGID[gid] = f[0]
		}
		for _, name := range strings.Split(f[3], ",") {
			// The kernel takes 65536 groups at most; nobody has more than a few.
			if name != "" && len(b.members[name]) < 1024 {
				b.members[name] = append(b.members[name], gid)
			}
		}
	}
	return b
}
