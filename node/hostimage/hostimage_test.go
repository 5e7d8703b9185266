// SPDX-License-Identifier: Apache-2.0

package hostimage

import (
	"archive/zip"
	"bytes"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

func TestResolve(t *testing.T) {
	for _, name := range []string{
		"host", "host:latest", "opensandbox/code-interpreter", "opensandbox/code-interpreter:latest", "opensandbox/code-interpreter:v1.0.2",
		"docker.io/opensandbox/code-interpreter:v1.0.1", "registry.example.com/opensandbox/code-interpreter",
		"registry.example.com:5000/opensandbox/code-interpreter:v1", "localhost/opensandbox/code-interpreter", "localhost:5000/opensandbox/code-interpreter",
	} {
		if !Resolve(name) {
			t.Errorf("%q is not resolved", name)
		}
	}
	for _, name := range []string{
		"", "host:", "host:writable", "host:v2", "hosts", "Host", "docker.io/host", "ubuntu", "python:3.11", "opensandbox/desktop", "code-interpreter",
		"other/code-interpreter", "evil/opensandbox/code-interpreter", "opensandbox/code-interpreter/x", "opensandbox/code-interpreter:",
		"opensandbox/code-interpreter:a/b", "opensandbox/code-interpreter@sha256:0000", "opensandbox/code-interpreter: x", "../host", "host\x00",
		"docker.io/x/opensandbox/code-interpreter",
	} {
		if Resolve(name) {
			t.Errorf("%q is resolved", name)
		}
	}
	for _, image := range Aliases() {
		if !Resolve(image.Name) || image.Description == "" {
			t.Errorf("alias %+v", image)
		}
	}
}

// fake is a machine with what a skeleton needs and much it must not have.
func fake(t *testing.T) machine {
	t.Helper()
	m := machine{t.TempDir()}
	put := func(name, text string, mode fs.FileMode) {
		t.Helper()
		if err := os.MkdirAll(filepath.Dir(m.path(name)), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(m.path(name), []byte(text), mode); err != nil {
			t.Fatal(err)
		}
		if err := os.Chmod(m.path(name), mode); err != nil {
			t.Fatal(err)
		}
	}
	link := func(target, name string) {
		t.Helper()
		if err := os.MkdirAll(filepath.Dir(m.path(name)), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.Symlink(target, m.path(name)); err != nil {
			t.Fatal(err)
		}
	}
	put("usr/bin/sh", "", 0o755)
	put("usr/bin/bash", "", 0o755)
	put("usr/bin/python3.12", "", 0o755)
	link("python3.12", "usr/bin/python3")
	link("usr/bin", "bin")
	link("/usr/lib64", "lib64")
	put("lib/libc.so", "", 0o644) // not merged
	put("etc/debian_version", "12\n", 0o644)
	put("etc/services", "http 80/tcp\n", 0o664)
	put("etc/skel/.profile", "p\n", 0o644)
	put("etc/ssl/certs/ca.pem", "cert", 0o644)
	put("etc/dpkg/origins/debian", "d", 0o644)
	link("/usr/share/ca/x.crt", "etc/ssl/certs/x.pem")
	link("../services", "etc/skel/services")
	link("../usr/lib/os-release", "etc/os-release")
	link("/usr/bin/vim", "etc/alternatives/editor")

	const secret = "SECRET"
	put("etc/shadow", secret, 0o644)
	put("etc/passwd", "SECRET:x:1001:1001::/home/SECRET:/bin/sh\n", 0o644)
	put("etc/machine-id", secret, 0o644)
	put("etc/hosts", "10.0.0.1 SECRET\n", 0o644)
	put("etc/resolv.conf", "nameserver SECRET\n", 0o644)
	put("etc/nsswitch.conf", "passwd: SECRET\n", 0o644)
	put("etc/environment", secret, 0o644)
	put("etc/pip.conf", secret, 0o644)
	put("etc/profile.d/proxy.sh", secret, 0o644)
	put("etc/ssl/private/server.key", secret, 0o644)
	put("etc/ssl/certs/server.key", secret, 0o644)
	put("etc/ssh/ssh_host_key", secret, 0o644)
	put("etc/apt/auth.conf", secret, 0o644)
	put("etc/docker/key.json", secret, 0o644)
	put("etc/unknown/file", secret, 0o644)
	put("etc/fonts/hidden.conf", secret, 0o640)
	put("etc/perl/hidden/readable", secret, 0o644)
	if err := os.Chmod(m.path("etc/perl/hidden"), 0o750); err != nil {
		t.Fatal(err)
	}
	put("root/.ssh/id", secret, 0o644)
	put("opt/app", secret, 0o644)
	link("/etc/shadow", "etc/alternatives/a")
	link("../../etc/shadow", "etc/alternatives/b")
	link("/root/.ssh/id", "etc/alternatives/c")
	link("/usr/../root/.ssh/id", "etc/alternatives/d")
	link("../shadow", "etc/skel/e")
	link("/etc/skel/../shadow", "etc/skel/f")
	link("/opt/app", "etc/localtime")
	link("/etc", "etc/fonts/g")
	if err := unix.Mkfifo(m.path("etc/fonts/fifo"), 0o666); err != nil {
		t.Fatal(err)
	}
	return m
}

func list(t *testing.T, root string) map[string]string {
	t.Helper()
	found := map[string]string{}
	err := filepath.WalkDir(root, func(file string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		name, _ := filepath.Rel(root, file)
		switch {
		case d.Type() == fs.ModeSymlink:
			link, err := os.Readlink(file)
			found[name] = "-> " + link
			return err
		case d.IsDir():
			found[name] = "dir"
		default:
			text, err := os.ReadFile(file)
			found[name] = string(text)
			return err
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return found
}

func TestSkeletonTakesOnlyWhatIsListed(t *testing.T) {
	m, dir := fake(t), t.TempDir()
	digest, err := m.build(dir, Options{})
	if err != nil {
		t.Fatal(err)
	}
	got := list(t, filepath.Join(dir, digest))
	for name, text := range got {
		if strings.Contains(text, "SECRET") || strings.Contains(name, "hidden") || strings.Contains(name, "fifo") {
			t.Errorf("%s got in: %q", name, text)
		}
	}
	for _, name := range []string{"etc/shadow", "etc/alternatives/a", "etc/alternatives/b", "etc/alternatives/c", "etc/alternatives/d", "etc/skel/e", "etc/skel/f",
		"etc/localtime", "etc/fonts/g", "etc/ssl/private", "etc/unknown", "etc/profile.d", "etc/perl/hidden", "etc/machine-id", "opt/app"} {
		if text, ok := got[name]; ok {
			t.Errorf("%s is there: %q", name, text)
		}
	}
	for name, want := range map[string]string{
		"etc/services": "http 80/tcp\n", "etc/skel/.profile": "p\n", "etc/ssl/certs/ca.pem": "cert", "etc/dpkg/origins/debian": "d",
		"etc/ssl/certs/x.pem": "-> /usr/share/ca/x.crt", "etc/skel/services": "-> ../services", "etc/os-release": "-> ../usr/lib/os-release",
		"etc/alternatives/editor": "-> /usr/bin/vim", "bin": "-> usr/bin", "lib64": "-> /usr/lib64", "lib": "dir", "usr/local/bin/python": "-> /usr/bin/python3",
		"usr/local/lib/python3.12/dist-packages": "dir", "etc/hostname": "localhost\n", "etc/mtab": "-> /proc/self/mounts", "var/run": "-> /run",
	} {
		if got[name] != want {
			t.Errorf("%s is %q, want %q", name, got[name], want)
		}
	}
	if !strings.HasPrefix(got["etc/passwd"], "root:*:0:0:root:/root:/bin/bash\n") || !strings.Contains(got["etc/passwd"], "sandbox:*:1000:1000:") {
		t.Errorf("passwd is %s", got["etc/passwd"])
	}
	if !slices.Equal(m.binds(), []string{"/usr", "/lib"}) {
		t.Errorf("binds are %v", m.binds())
	}
	for name, want := range map[string]fs.FileMode{
		".": 0o755, "tmp": 0o777 | fs.ModeSticky, "var/tmp": 0o777 | fs.ModeSticky, "workspace": 0o777 | fs.ModeSticky, "root": 0o700, "home/sandbox": 0o750,
		"etc/services": 0o644, "opt/opensandbox/code-interpreter.sh": 0o755, "opt/code-interpreter/code-interpreter.sh": 0o755,
	} {
		info, err := os.Stat(filepath.Join(dir, digest, name))
		if err != nil || info.Mode()&(fs.ModePerm|fs.ModeSticky|fs.ModeSetuid) != want {
			t.Errorf("mode of %s is %v, want %v (%v)", name, info.Mode(), want, err)
		}
	}
}

func TestBuildIsDoneOnceAndAgainWhenTheMachineChanges(t *testing.T) {
	m, dir := fake(t), t.TempDir()
	build := func() string {
		t.Helper()
		digest, err := m.build(dir, Options{})
		if err != nil {
			t.Fatal(err)
		}
		return digest
	}
	if err := os.Mkdir(filepath.Join(dir, unfinished+"killed"), 0o700); err != nil {
		t.Fatal(err)
	}
	first := build()
	mark := filepath.Join(dir, first, "mark")
	if err := os.WriteFile(mark, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	if second := build(); second != first {
		t.Errorf("%s became %s for no reason", first, second)
	}
	if _, err := os.Stat(mark); err != nil {
		t.Error("the second build made it anew")
	}
	if err := os.WriteFile(m.path("etc/services"), []byte("changed\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	third := build()
	if third == first {
		t.Error("a change of /etc/services was not seen")
	}
	entries, _ := os.ReadDir(dir)
	if len(entries) != 2 {
		t.Errorf("left in the directory: %v", entries)
	}
}

func TestPipIsOfferedWhereThereIsNone(t *testing.T) {
	pip := t.TempDir()
	for name, text := range map[string]string{"pip/__init__.py": "x", "pip/__pycache__/y.pyc": "x", "pip-1.0.dist-info/METADATA": "m", "other/__init__.py": "x"} {
		if err := os.MkdirAll(filepath.Dir(filepath.Join(pip, name)), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(pip, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	m, dir := fake(t), t.TempDir()
	digest, err := m.build(dir, Options{PipDir: pip})
	if err != nil {
		t.Fatal(err)
	}
	got := list(t, filepath.Join(dir, digest))
	packages := "usr/local/lib/python3.12/dist-packages/"
	if got[packages+"pip/__init__.py"] != "x" || got[packages+"pip-1.0.dist-info/METADATA"] != "m" || got["usr/local/bin/pip"] == "" ||
		got[packages+"pip/__pycache__"] != "" || got[packages+"other"] != "" {
		t.Errorf("pip is not as it should be: %v", got)
	}
	if err := os.MkdirAll(m.path("usr/lib/python3/dist-packages/pip"), 0o755); err != nil {
		t.Fatal(err)
	}
	if digest, err = m.build(dir, Options{PipDir: pip}); err != nil {
		t.Fatal(err)
	}
	if got := list(t, filepath.Join(dir, digest)); got["usr/local/bin/pip"] != "" {
		t.Error("pip is offered although the machine has its own")
	}
}

func TestMachinesWithoutTheUsualDirectoriesAreRefused(t *testing.T) {
	if _, err := (machine{t.TempDir()}).build(t.TempDir(), Options{}); err == nil || !strings.Contains(err.Error(), "/bin/sh") {
		t.Errorf("got %v", err)
	}
}

// On the real machine: no file of the skeleton may be one that others cannot read, and none may carry an
// interesting name.
func TestThisMachinesSkeletonHasNoSecrets(t *testing.T) {
	dir := t.TempDir()
	digest, err := Build(dir, Options{})
	if err != nil {
		t.Fatal(err)
	}
	etc := filepath.Join(dir, digest, "etc")
	err = filepath.WalkDir(etc, func(file string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		name, _ := filepath.Rel(etc, file)
		for _, word := range []string{"shadow", "private", "ssh", "machine-id", "auth.conf", "docker", "sudoers", "postgres", "redis"} {
			// alternatives have names such as ssh-askpass: links into /usr
			if strings.Contains(name, word) && d.Type() != fs.ModeSymlink {
				t.Errorf("/etc/%s is in the skeleton", name)
			}
		}
		if d.Type().IsRegular() {
			if info, err := os.Stat("/etc/" + name); err == nil && info.Mode().Perm()&0o004 == 0 {
				t.Errorf("/etc/%s is not for everybody here, but it is in the skeleton", name)
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

// enter runs a shell script in the skeleton as a sandbox would: root of a user namespace, /usr bound
// read-only, /usr/local its own.
func enter(t *testing.T, script string) string {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root to give the skeleton to another user")
	}
	const base = 1879048192
	dir := t.TempDir()
	digest, err := Build(dir, Options{})
	if err != nil {
		t.Fatal(err)
	}
	root := filepath.Join(dir, digest)
	err = filepath.WalkDir(root, func(file string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		id := int(info.Sys().(*syscall.Stat_t).Uid)
		if err := os.Lchown(file, base+id, base+id); err != nil || d.Type() == fs.ModeSymlink {
			return err
		}
		return os.Chmod(file, info.Mode())
	})
	if err != nil {
		t.Fatal(err)
	}
	for parent := dir; parent != "/tmp" && parent != "/"; parent = filepath.Dir(parent) {
		if err := os.Chmod(parent, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	writeWheel(t, filepath.Join(root, "tmp", "demo_wheel-1.0-py3-none-any.whl"))
	outer := `set -e
cd "$0"
mount -n --bind usr/local mnt
mount -n --bind /usr usr
mount -n -o remount,bind,ro,nosuid,nodev usr 2>/dev/null || mount -n -o remount,bind,ro usr
mount -n --move mnt usr/local
for d in bin sbin lib lib32 lib64 libx32; do if [ -d "/$d" ] && [ ! -L "/$d" ]; then mount -n --bind "/$d" "$d"; fi; done
mount -n -t proc proc proc
for d in null urandom; do touch dev/$d; mount -n --bind /dev/$d dev/$d; done
exec chroot . /bin/sh -c "cd /workspace; $1"`
	cmd := exec.Command("/bin/sh", "-c", outer, root, script)
	cmd.Env = Env()
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags:                 unix.CLONE_NEWUSER | unix.CLONE_NEWNS | unix.CLONE_NEWPID,
		UidMappings:                []syscall.SysProcIDMap{{HostID: base, Size: 65536}},
		GidMappings:                []syscall.SysProcIDMap{{HostID: base, Size: 65536}},
		GidMappingsEnableSetgroups: true,
		Credential:                 &syscall.Credential{},
	}
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	return string(out)
}

// writeWheel makes a Python package with one module and one program.
func writeWheel(t *testing.T, file string) {
	t.Helper()
	var b bytes.Buffer
	z := zip.NewWriter(&b)
	for _, part := range [][2]string{
		{"demo_wheel.py", "def main():\n    print('from the wheel')\n"},
		{"demo_wheel-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: demo-wheel\nVersion: 1.0\n"},
		{"demo_wheel-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"},
		{"demo_wheel-1.0.dist-info/entry_points.txt", "[console_scripts]\ndemo-wheel = demo_wheel:main\n"},
		{"demo_wheel-1.0.dist-info/RECORD", "demo_wheel.py,,\n"},
	} {
		w, err := z.Create(part[0])
		if err != nil {
			t.Fatal(err)
		}
		fmt.Fprint(w, part[1])
	}
	if err := z.Close(); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file, b.Bytes(), 0o644); err != nil {
		t.Fatal(err)
	}
}

func need(t *testing.T, programs ...string) {
	t.Helper()
	for _, p := range programs {
		if _, err := os.Stat("/usr/bin/" + p); err != nil {
			t.Skipf("/usr/bin/%s is not on this machine", p)
		}
	}
}

func TestProgramsRunInIt(t *testing.T) {
	need(t, "bash")
	out := enter(t, `bash -lc 'id -un; id -un 1000; echo $HOME; test -w /usr/local/bin && ! touch /usr/bin/x 2>/dev/null && stat -c %U /usr/bin/env; ls /root /home'`)
	if out != "root\nsandbox\n/root\nnobody\n/home:\nsandbox\n\n/root:\n" {
		t.Errorf("said %q", out)
	}
}

func TestPipInstallsAWheel(t *testing.T) {
	need(t, "python3", "pip")
	out := enter(t, `set -e; python -c 'import sys; print(sys.prefix)'; pip install -q --no-index /tmp/demo_wheel-1.0-py3-none-any.whl; demo-wheel; python3 -c 'import demo_wheel; print(demo_wheel.__file__)'; python3 -m venv --without-pip v && v/bin/python -c 'print(6*7)'`)
	version := machine{"/"}.python()
	want := "/usr\nfrom the wheel\n/" + machine{"/"}.packages(version) + "/demo_wheel.py\n42\n"
	if out != want {
		t.Errorf("said %q, want %q", out, want)
	}
}

func TestGitRuns(t *testing.T) {
	need(t, "git")
	out := enter(t, `git init -q . && echo x > f && git add f && git -c user.name=a -c user.email=a@b commit -qm first && git log --format=%s`)
	if out != "first\n" {
		t.Errorf("said %q", out)
	}
}

func TestEntryPointKeepsRunning(t *testing.T) {
	out := enter(t, `for s in /opt/opensandbox/code-interpreter.sh /opt/code-interpreter/code-interpreter.sh; do timeout 0.3 $s; echo $?; done`)
	if out != "opensandbox code interpreter: ready\n124\nopensandbox code interpreter: ready\n124\n" {
		t.Errorf("said %q", out)
	}
}

func TestVersionsThatAreNotThereAreSaid(t *testing.T) {
	m := machine{t.TempDir()}
	for _, dir := range []string{"usr/bin"} {
		if err := os.MkdirAll(m.path(dir), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if got := m.warnings(map[string]string{"PYTHON_VERSION": "3.11", "OTHER": "1"}); len(got) != 1 || !strings.Contains(got[0], "no Python") {
		t.Errorf("without Python: %q", got)
	}
	if err := os.Symlink("python3.11", m.path("usr/bin/python3")); err != nil {
		t.Fatal(err)
	}
	for wanted, count := range map[string]int{"3.11": 0, "3.11.2": 0, "3.1": 1, "3.12": 1, "": 0} {
		if got := m.warnings(map[string]string{"PYTHON_VERSION": wanted}); len(got) != count {
			t.Errorf("PYTHON_VERSION %q: %q", wanted, got)
		}
	}
	if got := m.warnings(map[string]string{"NODE_VERSION": "20", "GO_VERSION": "1.22"}); len(got) != 2 {
		t.Errorf("Node and Go: %q", got)
	}
	if got := m.warnings(nil); got != nil {
		t.Errorf("nothing asked, yet %q", got)
	}
}
