// SPDX-License-Identifier: Apache-2.0

package command

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"opensandbox.io/node/account"
	"opensandbox.io/node/envfile"
	"opensandbox.io/node/reply"
	"opensandbox.io/node/safefile"
	"opensandbox.io/node/wire"
)

const (
	maxTimeout  = 366 * 24 * time.Hour // far enough, and no overflow
	envFileMax  = 1 << 20
	envFileName = "EXECD_ENVS"
)

// prepare checks a request and resolves everything in it. The caller closes spec.Dir.
func (r *Runner) prepare(req *wire.RunCommandRequest) (*launch, error) {
	l := &launch{merge: req.Background, stdin: req.Stdin, record: Record{Background: req.Background, UID: req.UID}}
	if req.Merge != nil {
		l.merge = *req.Merge
	}
	l.record.Merged = l.merge
	switch {
	case req.Command != "" && len(req.Argv) > 0:
		return nil, invalid("Give either command or argv, not both.")
	case req.Command == "" && len(req.Argv) == 0:
		return nil, invalid("Give a command or an argv.")
	case len(req.Argv) > 0 && req.Argv[0] == "":
		return nil, invalid("argv[0] is empty.")
	}
	for _, word := range append([]string{req.Command}, req.Argv...) {
		if strings.IndexByte(word, 0) >= 0 {
			return nil, invalid("A command cannot hold a NUL byte.")
		}
	}
	for name, value := range req.Envs {
		if name == "" || strings.ContainsAny(name, "=\x00") || strings.IndexByte(value, 0) >= 0 {
			return nil, invalid("envs: %q is not a valid variable.", name)
		}
	}
	if req.Timeout != nil {
		ms := *req.Timeout
		if ms < 0 || ms > maxTimeout.Milliseconds() {
			return nil, invalid("timeout must be between 0 and %d milliseconds.", maxTimeout.Milliseconds())
		}
		l.timeout = time.Duration(ms) * time.Millisecond
	}
	var err error
	if l.spec.Credential, err = credential(req.UID, req.GID); err != nil {
		return nil, err
	}
	env := r.environment(req.Envs)
	l.spec.Env = env.list
	if l.spec.Dir, err = r.directory(req, env); err != nil {
		return nil, err
	}
	l.record.Cwd = l.spec.Dir.Name()
	if len(req.Argv) > 0 {
		l.argv, l.content = req.Argv, quote(req.Argv)
		l.path = find(req.Argv[0], env)
		return l, nil
	}
	l.content = req.Command
	shell := "bash"
	if l.path = find(shell, env); l.path == "" {
		shell = "sh"
		l.path = find(shell, env)
	}
	l.argv = []string{shell, "-c", req.Command}
	return l, nil
}

func invalid(format string, args ...any) *reply.Fault {
	return reply.Errorf(wire.CodeInvalidRequestBody, format, args...)
}

// credential resolves the user of a command; nil keeps the daemon's.
func credential(uid, gid *int64) (*syscall.Credential, error) {
	if uid == nil {
		if gid != nil {
			return nil, invalid("gid needs a uid.")
		}
		return nil, nil
	}
	for name, id := range map[string]*int64{"uid": uid, "gid": gid} {
		if id != nil && (*id < 0 || *id >= 1<<32-1) {
			return nil, invalid("%s must be between 0 and %d.", name, int64(1<<32-2))
		}
	}
	// A user that nobody has written down gets a group of its own number, not the group of root.
	c := &syscall.Credential{Uid: uint32(*uid), Gid: uint32(*uid)}
	book := account.Read()
	if u, ok := book.User(c.Uid); ok {
		c.Gid, c.Groups = u.GID, book.Groups(u)
	}
	if gid != nil {
		c.Gid = uint32(*gid)
	}
	return c, nil
}

// environment is the one a command gets.
type environment struct {
	list []string
	at   map[string]int // nil until something is looked up
}

func (e *environment) lookup(name string) (string, bool) {
	if e.at == nil {
		e.at = make(map[string]int, len(e.list))
		for i, pair := range e.list {
			key, _, _ := strings.Cut(pair, "=")
			e.at[key] = i
		}
	}
	i, ok := e.at[name]
	if !ok {
		return "", false
	}
	return e.list[i][len(name)+1:], true
}

func (e *environment) set(name, value string) {
	if _, ok := e.lookup(name); ok {
		e.list[e.at[name]] = name + "=" + value
		return
	}
	e.at[name] = len(e.list)
	e.list = append(e.list, name+"="+value)
}

// environment puts together the default one, the EXECD_ENVS file as it is now, and the request's, later ones first.
func (r *Runner) environment(request map[string]string) *environment {
	e := &environment{list: append(make([]string, 0, len(r.Env)+len(request)+4), r.Env...)}
	if path, ok := e.lookup(envFileName); ok && path != "" {
		text, err := safefile.Read(path, envFileMax)
		if err == nil {
			pairs, bad := envfile.Parse(string(text), e.lookup)
			for _, p := range pairs {
				e.set(p[0], p[1])
			}
			if len(bad) > 0 {
				// One line, whatever the file holds: it is written inside, the log is kept outside.
				r.Log.Warn("EXECD_ENVS", "file", path, "problems", len(bad), "first", bad[0])
			}
		} else if !errors.Is(err, fs.ErrNotExist) {
			r.Log.Warn("EXECD_ENVS", "file", path, "problem", err.Error())
		}
	}
	for name, value := range request {
		e.set(name, value)
	}
	return e
}

// directory opens the working directory of a request. What is opened is what the process gets: a path could lead
// elsewhere by then.
func (r *Runner) directory(req *wire.RunCommandRequest, env *environment) (*os.File, error) {
	path, err := r.resolve(req.Cwd, env)
	if err != nil {
		return nil, err
	}
	dir, err := safefile.OpenDir(path)
	switch {
	case err == nil:
	case errors.Is(err, fs.ErrNotExist):
		return nil, invalid("The working directory does not exist: %s", path).WithHint("Create it first, or leave cwd out.")
	case errors.Is(err, unix.ENOTDIR):
		return nil, invalid("The working directory is not a directory: %s", path)
	case errors.Is(err, unix.ELOOP):
		return nil, invalid("The working directory leads through a link that cannot be followed: %s", path)
	default:
		return nil, invalid("The working directory cannot be used: %s: %v", path, err)
	}
	return dir, nil
}

// resolve makes a working directory's path absolute.
func (r *Runner) resolve(path string, env *environment) (string, error) {
	if path == "" {
		return r.Cwd, nil
	}
	home, _ := env.lookup("HOME")
	path, err := envfile.ExpandPath(path, home, env.lookup)
	if err != nil {
		return "", invalid("cwd: %v.", err)
	}
	if strings.IndexByte(path, 0) >= 0 {
		return "", invalid("cwd holds a NUL byte.")
	}
	if !filepath.IsAbs(path) {
		path = r.Cwd + "/" + path
	}
	return path, nil
}

// find looks a program up as a shell would, in the PATH of the command, not of the daemon. A name with a slash is
// left to the kernel.
func find(name string, env *environment) string {
	if strings.IndexByte(name, '/') >= 0 {
		return name
	}
	path, ok := env.lookup("PATH")
	if !ok {
		path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
	}
	for _, dir := range strings.Split(path, ":") {
		if dir == "" {
			dir = "."
		}
		candidate := dir + "/" + name
		if dir[0] != '/' {
			continue // relative to a directory the process is not in yet: a trap rather than a feature
		}
		var st unix.Stat_t
		if unix.Stat(candidate, &st) == nil && st.Mode&unix.S_IFMT == unix.S_IFREG && st.Mode&0o111 != 0 {
			return candidate
		}
	}
	return ""
}

// quote writes an argument list so that a shell would read it back.
func quote(argv []string) string {
	var b strings.Builder
	for i, word := range argv {
		if i > 0 {
			b.WriteByte(' ')
		}
		if word != "" && strings.IndexFunc(word, func(c rune) bool {
			return !(c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || strings.ContainsRune("%+,-./:=@_", c))
		}) < 0 {
			b.WriteString(word)
			continue
		}
		b.WriteString("'" + strings.ReplaceAll(word, "'", `'\''`) + "'")
	}
	return b.String()
}
