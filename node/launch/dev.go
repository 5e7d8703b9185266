// SPDX-License-Identifier: Apache-2.0

package launch

import (
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// devices are the nodes of a sandbox's /dev; all harmless to share.
var devices = []struct {
	name         string
	major, minor uint32
}{
	{"null", 1, 3}, {"zero", 1, 5}, {"full", 1, 7}, {"random", 1, 8}, {"urandom", 1, 9}, {"tty", 5, 0},
}

var deviceLinks = map[string]string{
	"fd":     "/proc/self/fd",
	"stdin":  "/proc/self/fd/0",
	"stdout": "/proc/self/fd/1",
	"stderr": "/proc/self/fd/2",
	"ptmx":   "pts/ptmx",
}

// mountDev makes the template of every sandbox's /dev at path, visible only in this mount namespace. Sandboxes get
// it as one read-only bind: nothing can be planted in it, and it costs one mount instead of eight.
func mountDev(path string, rootless bool) error {
	if err := os.MkdirAll(path, 0o755); err != nil {
		return err
	}
	tree, err := newFilesystem("tmpfs", unix.MOUNT_ATTR_NOSUID|unix.MOUNT_ATTR_NOEXEC, "mode", "0755", "size", "64k")
	if err != nil {
		return err
	}
	defer tree.Close()
	if err := unix.MoveMount(int(tree.Fd()), "", unix.AT_FDCWD, path, unix.MOVE_MOUNT_F_EMPTY_PATH); err != nil {
		return fmt.Errorf("mount %s: %w", path, err)
	}
	for _, d := range devices {
		if err := device(filepath.Join(path, d.name), d.name, d.major, d.minor, rootless); err != nil {
			return err
		}
	}
	for name, target := range deviceLinks {
		if err := os.Symlink(target, filepath.Join(path, name)); err != nil {
			return err
		}
	}
	// mqueue stays empty: it is also what masked directories of /proc and /sys show.
	for _, name := range []string{"pts", "shm", "mqueue"} {
		if err := os.Mkdir(filepath.Join(path, name), 0o755); err != nil {
			return err
		}
	}
	return nil
}

func device(path, name string, major, minor uint32, rootless bool) error {
	if !rootless {
		if err := unix.Mknod(path, unix.S_IFCHR|0o666, int(unix.Mkdev(major, minor))); err != nil {
			return fmt.Errorf("mknod %s: %w", path, err)
		}
		return os.Chmod(path, 0o666)
	}
	// Device nodes cannot be made in a user namespace, but those of the host can be shown.
	if err := os.WriteFile(path, nil, 0o666); err != nil {
		return err
	}
	if err := unix.Mount("/dev/"+name, path, "", unix.MS_BIND, ""); err != nil {
		return fmt.Errorf("bind /dev/%s: %w", name, err)
	}
	return nil
}
