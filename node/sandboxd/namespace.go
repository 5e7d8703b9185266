// SPDX-License-Identifier: Apache-2.0

package sandboxd

import (
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"opensandbox.io/node/reply"
	"opensandbox.io/node/wire"
)

// insideVariable tells the program that it already runs in its own namespaces. Its value is the user id it came from.
const insideVariable = "OPENSANDBOX_SANDBOXD_USER"

// EnterNamespace gives sandboxd a mount namespace of its own, which takes an exec: all threads have to be in it. It
// returns the user id that sandboxd was started by, in the process that is inside; other processes do not return
// except with an error.
//
// As root the process stays the same one. Others get a user namespace too, in a child, whose exit code is passed on
// until it is ready.
func EnterNamespace() (uid int, err error) {
	if value, inside := os.LookupEnv(insideVariable); inside {
		os.Unsetenv(insideVariable)
		if _, err := fmt.Sscan(value, &uid); err != nil {
			return 0, fmt.Errorf("%s=%q", insideVariable, value)
		}
		return uid, nil
	}
	if os.Geteuid() != 0 {
		return 0, enterUserNamespace()
	}
	runtime.LockOSThread()
	if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
		return 0, reply.Errorf(wire.CodeNodeUnsupportedHost, "sandboxd may not make a mount namespace: %v.", err).
			WithHint("Run it with CAP_SYS_ADMIN; in a container: docker run --privileged.")
	}
	return 0, unix.Exec("/proc/self/exe", os.Args, insideEnvironment(0))
}

// insideEnvironment is all that sandboxd needs of the environment.
func insideEnvironment(uid int) []string {
	env := []string{fmt.Sprintf("%s=%d", insideVariable, uid), "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
	if dir, ok := os.LookupEnv("XDG_RUNTIME_DIR"); ok {
		env = append(env, "XDG_RUNTIME_DIR="+dir)
	}
	return env
}

// slim prepares the mount namespace: sandboxes start from a copy of it, and every mount in it costs each of them.
func slim(keep []string) error {
	// Private first: nothing that is unmounted here may be unmounted for anybody else.
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make mounts private: %w", err)
	}
	text, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return err
	}
	lines := strings.Split(strings.TrimSpace(string(text)), "\n")
	for n := len(lines) - 1; n >= 0; n-- {
		fields := strings.Fields(lines[n])
		if len(fields) < 10 {
			continue
		}
		point := unescape(fields[4])
		kind := ""
		for k, field := range fields {
			if field == "-" && k+1 < len(fields) {
				kind = fields[k+1]
			}
		}
		if kind == "cgroup" || kind == "cgroup2" || needed(point, keep) {
			continue
		}
		// Rootless, what came from outside cannot be taken away; then it stays.
		unix.Unmount(point, unix.MNT_DETACH)
	}
	return nil
}

// needed tells whether sandboxd needs what is mounted there: the trees it shows to sandboxes, and the way to its own
// directories.
func needed(point string, keep []string) bool {
	for _, tree := range []string{"/proc", "/usr", "/etc", "/bin", "/sbin", "/lib", "/lib64"} {
		if point == tree || strings.HasPrefix(point, tree+"/") && tree != "/proc" {
			return true
		}
	}
	switch point {
	case "/", "/sys", "/sys/fs/cgroup", "/dev":
		return true
	}
	for _, path := range keep {
		if path == point || strings.HasPrefix(path, point+"/") || strings.HasPrefix(point, path+"/") {
			return true
		}
	}
	return false
}

func unescape(s string) string {
	return strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`).Replace(s)
}

// bindPlain mounts a directory on itself without set-user-id and device files: in the uppers of sandboxes both are
// real ones on disk.
func bindPlain(dir string) error {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	if err := os.Chmod(dir, 0o700); err != nil {
		return err
	}
	if err := unix.Mount(dir, dir, "", unix.MS_BIND, ""); err != nil {
		return fmt.Errorf("bind %s: %w", dir, err)
	}
	if err := unix.MountSetattr(unix.AT_FDCWD, dir, 0, &unix.MountAttr{Attr_set: unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NODEV}); err != nil {
		return fmt.Errorf("nosuid,nodev on %s: %w", dir, err)
	}
	return nil
}

// enterUserNamespace runs this program again as root of a user namespace that holds only the caller, and ends with
// it. It returns only with an error.
func enterUserNamespace() error {
	uid, gid := os.Geteuid(), os.Getegid()
	ready, told, err := os.Pipe()
	if err != nil {
		return err
	}
	pid, _, err := syscall.StartProcess("/proc/self/exe", os.Args, &syscall.ProcAttr{
		Env:   append(insideEnvironment(uid), readyVariable+"=1"),
		Files: []uintptr{0, 1, 2, told.Fd()},
		Sys: &syscall.SysProcAttr{
			// The third so that threads which visit a sandbox's to name it are allowed back.
			Cloneflags:  unix.CLONE_NEWUSER | unix.CLONE_NEWNS | unix.CLONE_NEWUTS,
			UidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: uid, Size: 1}},
			GidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: gid, Size: 1}},
			Setsid:      true,
		},
	})
	if err != nil {
		return noUserNamespace(err)
	}
	told.Close()
	one := make([]byte, 1)
	if n, _ := ready.Read(one); n == 1 {
		os.Exit(0)
	}
	var status unix.WaitStatus
	if _, err := unix.Wait4(pid, &status, 0, nil); err != nil {
		return err
	}
	if status.Exited() {
		os.Exit(status.ExitStatus())
	}
	return fmt.Errorf("sandboxd ended in its user namespace: signal %v", status.Signal())
}

// readyVariable says that open file readyFD is a pipe on which a child in a user namespace tells that it is up.
const (
	readyVariable = "OPENSANDBOX_SANDBOXD_READY"
	readyFD       = 3
)

// CloseInherited makes sure that nothing the caller left open goes any further, least of all into a sandbox.
func CloseInherited() {
	unix.CloseRange(readyFD, math.MaxUint32, unix.CLOSE_RANGE_CLOEXEC)
}

// tellParent lets the process outside of the user namespace end, if there is one waiting.
func tellParent(ready bool) {
	if _, waiting := os.LookupEnv(readyVariable); !waiting || !ready {
		return
	}
	os.Unsetenv(readyVariable)
	unix.Write(readyFD, []byte{1})
	unix.Close(readyFD)
}

// noUserNamespace says which right is missing and what grants it.
func noUserNamespace(err error) error {
	fault := reply.Errorf(wire.CodeNodeUnsupportedHost, "This user may not make user namespaces (%v), and sandboxd does not run as root.", err)
	for _, knob := range []struct{ file, bad, fix string }{
		{"/proc/sys/kernel/unprivileged_userns_clone", "0", "sudo sysctl kernel.unprivileged_userns_clone=1"},
		{"/proc/sys/kernel/apparmor_restrict_unprivileged_userns", "1", "sudo sysctl kernel.apparmor_restrict_unprivileged_userns=0"},
		{"/proc/sys/user/max_user_namespaces", "0", "sudo sysctl user.max_user_namespaces=15000"},
	} {
		if text, failed := os.ReadFile(knob.file); failed == nil && strings.TrimSpace(string(text)) == knob.bad {
			return fault.WithHint("Run: %s, or run opensandbox-server as root.", knob.fix)
		}
	}
	if errors.Is(err, unix.EPERM) || errors.Is(err, unix.EACCES) {
		return fault.WithHint("In a container, start it with --security-opt seccomp=unconfined; else run opensandbox-server as root.")
	}
	return fault.WithHint("Run opensandbox-server as root.")
}

// ways are the paths that must stay reachable in the slim namespace.
func ways(config *Config, runDir, blocksDir string) []string {
	paths := []string{config.StateDir, runDir, blocksDir}
	for _, path := range []string{config.PipDir, config.Ingress} {
		if path != "" {
			paths = append(paths, path)
		}
	}
	if self, err := os.Readlink("/proc/self/exe"); err == nil {
		paths = append(paths, filepath.Dir(self))
	}
	for i, path := range paths {
		if real, err := filepath.EvalSymlinks(path); err == nil {
			paths[i] = real
		}
	}
	return paths
}
