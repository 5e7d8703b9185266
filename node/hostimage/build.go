// SPDX-License-Identifier: Apache-2.0

package hostimage

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"sort"

	"golang.org/x/sys/unix"
)

// layout goes into the digest: raise it when the code below makes something else of the same inputs.
const layout = 3

// sandboxUser is an ordinary account for programs that refuse to run as root.
const sandboxUser = 1000

// Options of a build.
type Options struct {
	// PipDir is a directory with the Python package pip in it (pip/ and pip-*.dist-info/). It is offered to
	// the sandbox in /usr/local if this machine's python3 has none. Empty: no pip then.
	PipDir string
}

// Build makes the skeleton as dir/<digest> and returns the digest. The digest is of the inputs, so a second
// call finds the first one's work, and a changed machine gets another directory; older ones stay, because
// sandboxes may run on them.
func Build(dir string, opts Options) (digest string, err error) { return machine{"/"}.build(dir, opts) }

func (m machine) build(dir string, opts Options) (digest string, err error) {
	if err := m.check(); err != nil {
		return "", err
	}
	entries, err := m.etc()
	if err != nil {
		return "", err
	}
	digest = m.digest(entries, opts)
	final := filepath.Join(dir, digest)
	if _, err := os.Stat(final); err == nil {
		return digest, nil
	}
	if err := clearUnfinished(dir); err != nil {
		return "", err
	}
	tmp, err := os.MkdirTemp(dir, unfinished)
	if err != nil {
		return "", err
	}
	defer os.RemoveAll(tmp)
	s := &skeleton{machine: m, root: tmp}
	s.fill(entries, opts)
	if s.err != nil {
		return "", fmt.Errorf("build the skeleton: %w", s.err)
	}
	if err := publish(tmp, final); err != nil {
		return "", err
	}
	return digest, nil
}

const unfinished = ".unfinished-"

// clearUnfinished removes what a killed build left; only one daemon at a time works in dir.
func clearUnfinished(dir string) error {
	left, err := filepath.Glob(filepath.Join(dir, unfinished+"*"))
	for _, path := range left {
		err = errors.Join(err, os.RemoveAll(path))
	}
	return err
}

// publish renames, after everything is on disk: a power cut must not leave a directory of empty files that
// the next start takes for complete.
func publish(tmp, final string) error {
	f, err := os.Open(tmp)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := unix.Syncfs(int(f.Fd())); err != nil {
		return err
	}
	err = os.Rename(tmp, final)
	if errors.Is(err, fs.ErrExist) || errors.Is(err, unix.ENOTEMPTY) {
		return nil // somebody else finished the same one
	}
	return err
}

func (m machine) digest(entries []entry, opts Options) string {
	h := sha256.New()
	fmt.Fprintln(h, "layout", layout)
	for _, e := range entries {
		stamp(h, e.name, e.info, e.link)
	}
	links := m.links()
	for _, name := range topLevel {
		fmt.Fprintln(h, name, links[name])
	}
	fmt.Fprintln(h, m.binds(), m.shell())
	version := m.python()
	fmt.Fprintln(h, "python", version, m.packages(version), m.hasPip(version))
	if pip := filepath.Join(opts.PipDir, "pip", "__init__.py"); opts.PipDir != "" {
		if info, err := os.Lstat(pip); err == nil {
			stamp(h, pip, info, "")
		}
	}
	return hex.EncodeToString(h.Sum(nil)[:16])
}

func stamp(h hash.Hash, name string, info fs.FileInfo, link string) {
	// A directory's time changes with entries that are not taken.
	if info.IsDir() {
		fmt.Fprintf(h, "%q %v\n", name, info.Mode())
		return
	}
	fmt.Fprintf(h, "%q %v %d %d %q\n", name, info.Mode(), info.Size(), info.ModTime().UnixNano(), link)
}

// skeleton collects the first error, so that filling reads as a list.
type skeleton struct {
	machine
	root string
	err  error
}

func (s *skeleton) fill(entries []entry, opts Options) {
	s.directories()
	for _, e := range entries {
		s.copyEtc(e)
	}
	s.accounts()
	s.file("etc/hosts", 0o644, "127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n")
	s.file("etc/hostname", 0o644, "localhost\n") // each sandbox writes its own name when it has one
	// Without a name server the resolver asks 127.0.0.1, where nobody listens: names fail at once.
	s.file("etc/resolv.conf", 0o644, "options timeout:1 attempts:1\n")
	// The machine's own may name modules that ask its daemons (sss, systemd, ldap).
	s.file("etc/nsswitch.conf", 0o644, nsswitch)
	s.link("/proc/self/mounts", "etc/mtab")
	s.addPython(opts)
	for _, dir := range []string{"opt/opensandbox", "opt/code-interpreter"} {
		s.dir(dir, 0o755)
		s.file(path.Join(dir, "code-interpreter.sh"), 0o755, entryPoint)
	}
	s.chmod(".", 0o755)
}

const nsswitch = `passwd: files
group: files
shadow: files
hosts: files dns
networks: files
protocols: files
services: files
ethers: files
rpc: files
`

// entryPoint is what the published quick starts name as the program to run; the sandbox lives as long as it.
const entryPoint = `#!/bin/sh
# The interpreters are started by execd when a cell asks for one; this only keeps the sandbox alive.
echo "opensandbox code interpreter: ready"
exec sleep infinity
`

func (s *skeleton) directories() {
	for _, name := range []string{
		"dev", "etc", "home", "media", "mnt", "opt", "proc", "run", "run/lock", "srv", "sys", "usr", "usr/local",
		"var", "var/cache", "var/lib", "var/lib/misc", "var/log", "var/mail", "var/spool", "var/opt",
	} {
		s.dir(name, 0o755)
	}
	for _, name := range []string{"bin", "etc", "games", "include", "lib", "sbin", "share", "share/man", "src"} {
		s.dir(path.Join("usr/local", name), 0o755)
	}
	s.link("share/man", "usr/local/man")
	s.dir("root", 0o700)
	s.dir("home/sandbox", 0o750)
	s.own("home/sandbox", sandboxUser)
	// Anybody's in the sandbox, so that a command run as another user can work where commands start.
	s.dir("workspace", 0o777|fs.ModeSticky)
	s.dir("tmp", 0o777|fs.ModeSticky)
	s.dir("var/tmp", 0o777|fs.ModeSticky)
	s.link("/run", "var/run")
	s.link("/run/lock", "var/lock")
	links := s.links()
	for _, name := range topLevel {
		if target, ok := links[name]; ok {
			s.link(target, name)
		}
	}
	for _, name := range s.binds()[1:] { // /usr itself is there
		s.dir(name, 0o755)
	}
}

// accounts: the ids Debian gives everywhere, because programs look for them; none of this machine's own.
// The star in the password field means that no password fits, and no shadow file is needed.
func (s *skeleton) accounts() {
	users := []struct {
		name string
		id   int
		home string
	}{
		{"daemon", 1, "/usr/sbin"}, {"bin", 2, "/bin"}, {"sys", 3, "/dev"}, {"games", 5, "/usr/games"}, {"man", 6, "/var/cache/man"},
		{"mail", 8, "/var/mail"}, {"www-data", 33, "/var/www"}, {"backup", 34, "/var/backups"}, {"_apt", 42, "/nonexistent"},
	}
	passwd := fmt.Sprintf("root:*:0:0:root:/root:%s\n", s.shell())
	for _, u := range users {
		passwd += fmt.Sprintf("%s:*:%d:%d:%s:%s:/usr/sbin/nologin\n", u.name, u.id, u.id, u.name, u.home)
	}
	passwd += fmt.Sprintf("sandbox:*:%d:%d:sandbox:/home/sandbox:%s\n", sandboxUser, sandboxUser, s.shell())
	passwd += "nobody:*:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n"
	s.file("etc/passwd", 0o644, passwd)

	groups := map[string]int{
		"root": 0, "daemon": 1, "bin": 2, "sys": 3, "adm": 4, "tty": 5, "disk": 6, "lp": 7, "mail": 8, "man": 12, "kmem": 15, "dialout": 20,
		"cdrom": 24, "sudo": 27, "audio": 29, "www-data": 33, "backup": 34, "operator": 37, "src": 40, "_apt": 42, "utmp": 43, "video": 44,
		"plugdev": 46, "staff": 50, "games": 60, "users": 100, "sandbox": sandboxUser, "nogroup": 65534,
	}
	names := make([]string, 0, len(groups))
	for name := range groups {
		names = append(names, name)
	}
	sort.Slice(names, func(i, j int) bool { return groups[names[i]] < groups[names[j]] })
	group := ""
	for _, name := range names {
		group += fmt.Sprintf("%s:*:%d:\n", name, groups[name])
	}
	s.file("etc/group", 0o644, group)
}

func (m machine) shell() string {
	for _, shell := range []string{"/bin/bash", "/usr/bin/bash"} {
		if _, err := os.Stat(m.path(shell)); err == nil {
			return shell
		}
	}
	return "/bin/sh"
}

// addPython makes `python` and pip work, and pip's target exist: the interpreter looks at it only if it was
// there when it started.
func (s *skeleton) addPython(opts Options) {
	version := s.python()
	if version == "" {
		return
	}
	s.link("/usr/bin/python3", "usr/local/bin/python")
	packages := s.packages(version)
	s.dir(path.Dir(packages), 0o755)
	s.dir(packages, 0o755)
	if s.hasPip(version) || opts.PipDir == "" {
		return
	}
	parts, _ := filepath.Glob(filepath.Join(opts.PipDir, "pip-*.dist-info"))
	parts = append(parts, filepath.Join(opts.PipDir, "pip"))
	for _, part := range parts {
		s.copyTree(part, path.Join(packages, filepath.Base(part)))
	}
	const script = "#!/usr/bin/python3\nimport sys\nfrom pip._internal.cli.main import main\nsys.exit(main())\n"
	s.file("usr/local/bin/pip", 0o755, script)
	s.file("usr/local/bin/pip3", 0o755, script)
}

func (s *skeleton) copyEtc(e entry) {
	if s.err != nil {
		return
	}
	name := path.Join("etc", e.name)
	s.parents(name)
	switch {
	case e.info.IsDir():
		s.dir(name, 0o755)
	case e.link != "":
		s.link(e.link, name)
	default:
		f, err := s.read(e.name)
		if err != nil {
			s.fail(err)
			return
		}
		defer f.Close()
		s.write(name, e.info.Mode().Perm()&0o755, f)
	}
}

// copyTree takes regular files and directories of a package; a package has nothing else.
func (s *skeleton) copyTree(from, to string) {
	if s.err != nil {
		return
	}
	s.fail(filepath.WalkDir(from, func(file string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		below, err := filepath.Rel(from, file)
		if err != nil {
			return err
		}
		name := path.Join(to, below)
		switch {
		case d.IsDir() && d.Name() == "__pycache__":
			return fs.SkipDir
		case d.IsDir():
			s.dir(name, 0o755)
		case d.Type().IsRegular():
			f, err := os.Open(file)
			if err != nil {
				return err
			}
			defer f.Close()
			s.write(name, 0o644, f)
		}
		return s.err
	}))
}

// parents makes the directories above a listed file whose directory is not listed as a whole.
func (s *skeleton) parents(name string) {
	if dir := path.Dir(name); dir != "." {
		if _, err := os.Lstat(s.in(dir)); err != nil {
			s.parents(dir)
			s.dir(dir, 0o755)
		}
	}
}

func (s *skeleton) in(name string) string { return filepath.Join(s.root, name) }

func (s *skeleton) fail(err error) {
	if s.err == nil {
		s.err = err
	}
}

func (s *skeleton) dir(name string, mode fs.FileMode) {
	if s.err != nil {
		return
	}
	if err := os.Mkdir(s.in(name), 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		s.fail(err)
	}
	s.chmod(name, mode)
}

// chmod by itself, because the umask of the daemon must not decide.
func (s *skeleton) chmod(name string, mode fs.FileMode) {
	if s.err == nil {
		s.fail(os.Chmod(s.in(name), mode))
	}
}

// own is without effect for an ordinary user, or a namespace of one id, whose sandboxes have one id only.
func (s *skeleton) own(name string, id int) {
	if s.err == nil && os.Geteuid() == 0 {
		if err := os.Chown(s.in(name), id, id); !errors.Is(err, unix.EINVAL) {
			s.fail(err)
		}
	}
}

func (s *skeleton) link(target, name string) {
	if s.err == nil {
		s.fail(os.Symlink(target, s.in(name)))
	}
}

func (s *skeleton) file(name string, mode fs.FileMode, text string) {
	if s.err == nil {
		s.fail(os.WriteFile(s.in(name), []byte(text), mode))
		s.chmod(name, mode)
	}
}

func (s *skeleton) write(name string, mode fs.FileMode, from io.Reader) {
	if s.err != nil {
		return
	}
	f, err := os.OpenFile(s.in(name), os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		s.fail(err)
		return
	}
	_, err = io.Copy(f, from)
	s.fail(errors.Join(err, f.Close()))
	s.chmod(name, mode)
}
