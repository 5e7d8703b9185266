// SPDX-License-Identifier: Apache-2.0

package file

import (
	"errors"
	"io/fs"
	"os"
	"path"
	"strings"
	"unicode/utf8"

	"golang.org/x/sys/unix"

	"opensandbox.io/node/envfile"
	"opensandbox.io/node/reply"
	"opensandbox.io/node/safefile"
	"opensandbox.io/node/wire"
)

// place is where a path leads: a name in an open directory. Working below a descriptor means that what was checked
// is what is used, however the tree is rearranged meanwhile.
type place struct {
	path string   // absolute and cleaned, for the eye
	dir  *os.File // O_PATH
	name string   // "." when the path is the directory itself
}

func (p *place) fd() int { return int(p.dir.Fd()) }

func (p *place) Close() { _ = p.dir.Close() }

// expand makes a given path absolute: ~, $VAR, and relative to the default directory.
func (a *API) expand(given string) (string, error) {
	if given == "" {
		return "", reply.Errorf(wire.CodeInvalidRequestBody, "A path is empty.")
	}
	if strings.IndexByte(given, 0) >= 0 {
		return "", reply.Errorf(wire.CodeInvalidRequestBody, "A path holds a NUL byte.")
	}
	home, _ := a.lookup("HOME")
	p, err := envfile.ExpandPath(given, home, a.lookup)
	if err != nil {
		return "", reply.Errorf(wire.CodeInvalidRequestBody, "%s: %v", given, err)
	}
	if !strings.HasPrefix(p, "/") {
		p = a.cwd + "/" + p
	}
	return p, nil
}

// locate opens the directory that a path's last element is in. With parents, directories that are missing are made.
func (a *API) locate(given string, parents bool) (*place, error) {
	full, err := a.expand(given)
	if err != nil {
		return nil, err
	}
	p := escaped(full)
	if p == nil {
		if p, err = open(full, parents); err != nil {
			return nil, explain(given, err)
		}
	}
	if err := safefile.CheckNotProc(p.fd()); err != nil {
		p.Close()
		return nil, explain(given, err)
	}
	return p, nil
}

// escaped opens what a listing shows under this name, if it had to escape it. That comes before what has the name
// itself, which is shown under another one.
func escaped(full string) *place {
	raw, ok := unescape(full)
	if !ok {
		return nil
	}
	p, err := open(raw, false)
	if err != nil {
		return nil
	}
	if !p.exists() {
		p.Close()
		return nil
	}
	return p
}

func (p *place) exists() bool { return exists(p.fd(), p.name) }

func exists(at int, name string) bool {
	var st unix.Stat_t
	return unix.Fstatat(at, name, &st, unix.AT_SYMLINK_NOFOLLOW) == nil
}

func open(full string, parents bool) (*place, error) {
	// Not path.Clean: `link/..` is where the link leads, not where it lies.
	trimmed := strings.TrimRight(full, "/")
	i := strings.LastIndexByte(trimmed, '/')
	dir, name := "/", "."
	if i >= 0 {
		dir, name = trimmed[:i+1], trimmed[i+1:]
	}
	if name == ".." || name == "." {
		dir, name = full, "."
	}
	f, err := safefile.OpenDir(dir)
	if err != nil && parents && errors.Is(err, fs.ErrNotExist) {
		f, err = makeParents(dir)
	}
	if err != nil {
		return nil, err
	}
	return &place{path: path.Clean(full), dir: f, name: name}, nil
}

// makeParents opens a directory and makes what is missing on the way, one element at a time.
func makeParents(dir string) (*os.File, error) {
	at, err := safefile.OpenDir("/")
	if err != nil {
		return nil, err
	}
	for _, name := range strings.Split(dir, "/") {
		if name == "" || name == "." {
			continue
		}
		next, err := safefile.Openat(int(at.Fd()), name, unix.O_PATH|unix.O_DIRECTORY, 0)
		if err == unix.ENOENT {
			if err = unix.Mkdirat(int(at.Fd()), name, 0o755); err == nil || err == unix.EEXIST {
				next, err = safefile.Openat(int(at.Fd()), name, unix.O_PATH|unix.O_DIRECTORY, 0)
			}
		}
		_ = at.Close()
		if err != nil {
			return nil, err
		}
		at = os.NewFile(uintptr(next), dir)
	}
	return at, nil
}

// follow goes through symbolic links at the place's end, so that a write lands where the link leads. It reads each
// link itself: the kernel would also follow one of /proc.
func (p *place) follow() error {
	for range 40 {
		buf := make([]byte, unix.PathMax)
		n, err := unix.Readlinkat(p.fd(), p.name, buf)
		if err == unix.EINVAL || err == unix.ENOENT {
			return nil // not a link, or nothing yet
		}
		if err != nil {
			return err
		}
		target := string(buf[:n])
		dir, name := path.Split(strings.TrimRight(target, "/"))
		if target == "" || name == ".." || name == "." || name == "" {
			dir, name = target, "."
		}
		if dir == "" {
			p.name = name
			continue
		}
		fd, err := safefile.Openat(p.fd(), dir, unix.O_PATH|unix.O_DIRECTORY, 0)
		if err != nil {
			return err
		}
		_ = p.dir.Close()
		p.dir, p.name = os.NewFile(uintptr(fd), dir), name
		if err := safefile.CheckNotProc(fd); err != nil {
			return err
		}
	}
	return unix.ELOOP
}

// explain turns the kernel's refusal into an answer.
func explain(given string, err error) error {
	var f *reply.Fault
	if errors.As(err, &f) {
		return f
	}
	shown := asGiven(given)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return reply.Errorf(wire.CodeFileNotFound, "%s does not exist.", shown)
	case errors.Is(err, safefile.ErrProc):
		return reply.Errorf(wire.CodeNotSupported, "%s lies in /proc.", shown).WithHint("Read it with a command; files of /proc look different to each process.")
	case errors.Is(err, safefile.ErrNotRegular):
		return reply.Errorf(wire.CodeInvalidFile, "%s: %v.", shown, err).WithHint("Only regular files have contents here; use a command for the others.")
	case errors.Is(err, unix.ELOOP):
		return reply.Errorf(wire.CodeInvalidFile, "%s leads through a link that is not followed, or through too many.", shown).
			WithHint("Links of /proc lead into the daemon's own files; read them with a command.")
	case errors.Is(err, unix.ENOTDIR):
		return reply.Errorf(wire.CodeInvalidFile, "%s: a part of the path is not a directory.", shown).WithHint("Correct the path.")
	case errors.Is(err, unix.ENAMETOOLONG):
		return reply.Errorf(wire.CodeInvalidFile, "%.100s…: the name is too long.", shown).WithHint("A name has at most 255 bytes, a path 4095.")
	case errors.Is(err, unix.EISDIR):
		return reply.Errorf(wire.CodeInvalidFile, "%s is a directory.", shown).WithHint("Give the path of a file in it.")
	case errors.Is(err, unix.EROFS):
		return reply.Errorf(wire.CodeInvalidFile, "%s: the sandbox can only read there.", shown).
			WithHint("Write to a directory of the sandbox's own, such as /tmp or the working directory.")
	case errors.Is(err, unix.EACCES), errors.Is(err, unix.EPERM):
		return reply.Errorf(wire.CodeInvalidFile, "%s: not permitted: %v.", shown, errnoOf(err)).
			WithHint("The file or its directory is protected from the user who asks; choose another path or another user.")
	case errors.Is(err, unix.ENOSPC), errors.Is(err, unix.EDQUOT):
		return reply.Errorf(wire.CodeResourceExhausted, "%s: no space left in the sandbox.", shown).WithHint("Delete something first.")
	}
	return reply.Errorf(wire.CodeRuntimeError, "%s: %v", shown, err)
}

// errnoOf is the kernel's own word, without the names around it: those may be a temporary file's.
func errnoOf(err error) error {
	var errno unix.Errno
	if errors.As(err, &errno) {
		return errno
	}
	return err
}

// escape makes a name that JSON can hold: bytes that are not UTF-8 become %XX, and in such a name % becomes %25. A
// name that is text stays as it is, unless it looks like what this makes: then its % become %25 too, so that no two
// names are shown alike. The result, given back as a path, finds the file again (see locate).
func escape(name string) string {
	if utf8.ValidString(name) {
		if _, ok := unescape(name); !ok {
			return name
		}
	}
	return encode(name)
}

func encode(name string) string {
	const digits = "0123456789ABCDEF"
	var b strings.Builder
	for i := 0; i < len(name); {
		r, size := utf8.DecodeRuneInString(name[i:])
		switch {
		case r == utf8.RuneError && size == 1, name[i] == '%':
			b.WriteByte('%')
			b.WriteByte(digits[name[i]>>4])
			b.WriteByte(digits[name[i]&15])
			i++
		default:
			b.WriteString(name[i : i+size])
			i += size
		}
	}
	return b.String()
}

// ladder is how often a name can be escaped again before it is longer than any that exists.
const ladder = 128

// unescape undoes escape; ok only for what escape has changed: a name that is not text, or one that looks like the
// escaped form of another. The latter makes a ladder (n%FF, n%25FF, n%2525FF): each is shown as the next.
func unescape(name string) (raw string, ok bool) {
	raw, ok = decode(name)
	for at, step := raw, 0; ok && utf8.ValidString(at); step++ {
		if step == ladder {
			return "", false
		}
		at, ok = decode(at)
	}
	return raw, ok
}

// decode undoes encode, if there was something to do.
func decode(name string) (raw string, ok bool) {
	if strings.IndexByte(name, '%') < 0 || len(name) > 3*unix.PathMax {
		return "", false
	}
	var b strings.Builder
	for i := 0; i < len(name); i++ {
		if name[i] != '%' {
			b.WriteByte(name[i])
			continue
		}
		if i+2 >= len(name) {
			return "", false
		}
		hi, lo := unhex(name[i+1]), unhex(name[i+2])
		if hi < 0 || lo < 0 {
			return "", false
		}
		b.WriteByte(byte(hi<<4 | lo))
		i += 2
	}
	raw = b.String()
	return raw, encode(raw) == name
}

// asGiven shows a path in the caller's own words, as far as JSON can hold them.
func asGiven(given string) string {
	if utf8.ValidString(given) {
		return given
	}
	return encode(given)
}

func unhex(c byte) int {
	switch {
	case c >= '0' && c <= '9':
		return int(c - '0')
	case c >= 'A' && c <= 'F':
		return int(c-'A') + 10
	}
	return -1
}
