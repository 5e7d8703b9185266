// SPDX-License-Identifier: Apache-2.0

package hostimage

import (
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// machine is the system the skeleton is made from; tests give another root.
type machine struct{ root string }

func (m machine) path(name string) string { return filepath.Join(m.root, name) }

// topLevel are the directories that a merged /usr turns into links.
var topLevel = []string{"bin", "sbin", "lib", "lib32", "lib64", "libx32"}

// etcAllowed are files and whole directories below /etc, as path.Match patterns. The rule for adding one:
// programs need it, it holds no secret and no name of this machine, its users or its network. Hence not:
// environment and profile.d (proxies, tokens), gitconfig, npmrc, pip.conf, wgetrc, maven, apt (credentials
// in addresses), pam.d, cron.*, init.d, anything of a server.
var etcAllowed = []string{
	"alternatives", "bash.bashrc", "bindresvport.blacklist", "ca-certificates", "ca-certificates.conf",
	"crypto-policies", "debian_version", "dpkg/origins", "ethertypes", "fonts", "gai.conf", "glvnd", "groff", "gprofng.rc",
	"host.conf", "ImageMagick-*", "inputrc", "java*", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "libaudit.conf",
	"locale.alias", "locale.conf", "locale.gen", "localtime", "login.defs", "lsb-release", "magic", "magic.mime", "mailcap",
	"man_db.conf", "manpath.config", "mime.types", "mke2fs.conf", "netconfig", "OpenCL", "*-release", "perl", "php",
	"pki/ca-trust/extracted", "pki/tls/cert.pem", "pki/tls/certs", "pki/tls/openssl.cnf",
	"profile", "protocols", "python", "python3", "python3.*", "R", "rpc", "services", "shells", "skel",
	"ssl/cert.pem", "ssl/certs", "ssl/openssl.cnf", "terminfo", "texmf", "timezone", "vim", "xattr.conf",
}

// never is a second lock on the same door: names that no list may let in.
var never = []string{
	"shadow*", "gshadow*", "passwd*", "*private*", "*secret*", "*credential*", "*password*", "machine-id", "*.key", "*_key", "auth.conf*",
	"sudoers*", "ssh*", "docker*", "krb5*",
}

// allowed tells whether a path below /etc (without it) may be in the skeleton: it, or a directory above it, is listed.
func allowed(name string) bool {
	for part := range strings.SplitSeq(name, "/") {
		if slices.ContainsFunc(never, func(pattern string) bool { return match(pattern, part) }) {
			return false
		}
	}
	for prefix := name; prefix != "."; prefix = path.Dir(prefix) {
		if slices.ContainsFunc(etcAllowed, func(pattern string) bool { return match(pattern, prefix) }) {
			return true
		}
	}
	return false
}

func match(pattern, name string) bool {
	ok, err := path.Match(pattern, name)
	return ok && err == nil
}

// entry is something of /etc that goes into the skeleton.
type entry struct {
	name string // below /etc
	info fs.FileInfo
	link string // where it points, for a link
}

// etc lists what may be taken, directories before what is in them. Something that cannot be read or is not
// for everybody is left out, not an error.
func (m machine) etc() ([]entry, error) {
	base := m.path("etc")
	var found []entry
	err := filepath.WalkDir(base, func(file string, d fs.DirEntry, err error) error {
		if file == base {
			return err
		}
		if err != nil {
			return fs.SkipDir
		}
		name, err := filepath.Rel(base, file)
		if err != nil {
			return err
		}
		if !allowed(name) {
			if d.IsDir() && !leadsToAllowed(name) {
				return fs.SkipDir
			}
			return nil
		}
		info, err := d.Info()
		if err != nil {
			return nil // gone meanwhile
		}
		switch {
		case info.IsDir():
			if info.Mode().Perm()&0o005 != 0o005 {
				return fs.SkipDir
			}
			found = append(found, entry{name: name, info: info})
		case info.Mode().IsRegular():
			if info.Mode().Perm()&0o004 != 0 {
				found = append(found, entry{name: name, info: info})
			}
		case info.Mode().Type() == fs.ModeSymlink:
			link, err := os.Readlink(file)
			if err == nil && linkAllowed(name, link) {
				found = append(found, entry{name: name, info: info, link: link})
			}
		}
		return nil
	})
	return found, err
}

// leadsToAllowed tells whether a directory that is not listed has something listed below it.
func leadsToAllowed(name string) bool {
	return slices.ContainsFunc(etcAllowed, func(pattern string) bool { return strings.HasPrefix(pattern, name+"/") })
}

// linkAllowed keeps links whose target the sandbox has as well: below /usr, or taken from /etc.
func linkAllowed(name, target string) bool {
	if !path.IsAbs(target) {
		target = path.Join("/etc", path.Dir(name), target)
	}
	target = path.Clean(target)
	if below, ok := strings.CutPrefix(target, "/etc/"); ok {
		return allowed(below)
	}
	return strings.HasPrefix(target, "/usr/")
}

// read opens a file of /etc and checks the opened one: the listing may be old.
func (m machine) read(name string) (*os.File, error) {
	file := m.path(path.Join("etc", name))
	f, err := os.OpenFile(file, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	info, err := f.Stat()
	if err == nil && (!info.Mode().IsRegular() || info.Mode().Perm()&0o004 == 0) {
		err = fmt.Errorf("%s changed while it was copied", file)
	}
	if err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

// links are the top-level names that point into /usr here.
func (m machine) links() map[string]string {
	links := map[string]string{}
	for _, name := range topLevel {
		target, err := os.Readlink(m.path(name))
		if err == nil && strings.HasPrefix(strings.TrimPrefix(target, "/"), "usr/") {
			links[name] = target
		}
	}
	return links
}

func (m machine) binds() []string {
	binds := []string{"/usr"}
	for _, name := range topLevel {
		if info, err := os.Lstat(m.path(name)); err == nil && info.IsDir() {
			binds = append(binds, "/"+name)
		}
	}
	return binds
}

// check refuses systems that keep their programs elsewhere.
func (m machine) check() error {
	for _, shell := range []string{"usr/bin/sh", "bin/sh"} {
		if info, err := os.Stat(m.path(shell)); err == nil && info.Mode().IsRegular() {
			return nil
		}
	}
	return fmt.Errorf("this machine has no /bin/sh or /usr/bin/sh: the image host needs the usual directories (it does not work on NixOS or Guix)")
}

// python is the minor version of /usr/bin/python3, such as "3.11"; empty without one.
func (m machine) python() string {
	target, err := os.Readlink(m.path("usr/bin/python3"))
	for range 4 { // python3 -> python3.11, on some systems through /etc/alternatives
		if version, ok := strings.CutPrefix(filepath.Base(target), "python"); ok && strings.HasPrefix(version, "3.") {
			return version
		}
		if err != nil {
			break
		}
		if !path.IsAbs(target) {
			target = path.Join("/usr/bin", target)
		}
		target, err = os.Readlink(m.path(target))
	}
	found, _ := filepath.Glob(m.path("usr/lib*/python3.[0-9]*"))
	if _, err := os.Stat(m.path("usr/bin/python3")); err != nil || len(found) == 0 {
		return ""
	}
	return strings.TrimPrefix(filepath.Base(found[len(found)-1]), "python")
}

// packages is where pip run by root puts packages: Debian has a name of its own.
func (m machine) packages(version string) string {
	name := "site-packages"
	if _, err := os.Stat(m.path("etc/debian_version")); err == nil {
		name = "dist-packages"
	}
	return path.Join("usr/local/lib", "python"+version, name)
}

func (m machine) hasPip(version string) bool {
	for _, pattern := range []string{"usr/lib*/python3/dist-packages/pip", "usr/lib*/python" + version + "/site-packages/pip", "usr/lib*/python" + version + "/dist-packages/pip"} {
		if found, _ := filepath.Glob(m.path(pattern)); len(found) > 0 {
			return true
		}
	}
	return false
}
