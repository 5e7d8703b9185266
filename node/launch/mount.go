// SPDX-License-Identifier: Apache-2.0

package launch

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"

	"golang.org/x/sys/unix"

	"opensandbox.io/node/thread"
)

// Every tree a sandbox sees reaches it as a detached mount: an open file that is a mount nobody else can see.

// newFilesystem makes a detached mount of a kernel filesystem.
func newFilesystem(kind string, attributes int, options ...string) (*os.File, error) {
	context, err := unix.Fsopen(kind, unix.FSOPEN_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", kind, err)
	}
	defer unix.Close(context)
	for i := 0; i+1 < len(options); i += 2 {
		if err := unix.FsconfigSetString(context, options[i], options[i+1]); err != nil {
			return nil, fmt.Errorf("%s %s=%s: %w", kind, options[i], options[i+1], err)
		}
	}
	if err := unix.FsconfigCreate(context); err != nil {
		return nil, fmt.Errorf("%s: %w", kind, err)
	}
	fd, err := unix.Fsmount(context, unix.FSMOUNT_CLOEXEC, attributes)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", kind, err)
	}
	return os.NewFile(uintptr(fd), kind), nil
}

// cloneTree makes a detached bind of a directory with the given attributes. With a user namespace it is idmapped:
// files that belong to id 0 on disk belong to that namespace's root, and the other way round.
func cloneTree(path string, attributes uint64, userns *os.File, flags uint) (*os.File, error) {
	fd, err := unix.OpenTree(unix.AT_FDCWD, path, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|flags)
	if err != nil {
		return nil, fmt.Errorf("open %s: %w", path, err)
	}
	tree := os.NewFile(uintptr(fd), path)
	attr := unix.MountAttr{Attr_set: attributes}
	if userns != nil {
		attr.Attr_set |= unix.MOUNT_ATTR_IDMAP
		attr.Userns_fd = uint64(userns.Fd())
	}
	if attr.Attr_set != 0 {
		if err := unix.MountSetattr(fd, "", unix.AT_EMPTY_PATH|flags, &attr); err != nil {
			tree.Close()
			if userns != nil && errors.Is(err, unix.EINVAL) {
				return nil, fmt.Errorf("the filesystem of %s cannot map ids (ext4, xfs, btrfs and, from Linux 6.3, tmpfs can): %w", path, err)
			}
			return nil, fmt.Errorf("attributes of %s: %w", path, err)
		}
	}
	return tree, nil
}

// overlay makes the sandbox's root: a writable layer in dir over a read-only image.
func (h *Host) overlay(image, dir string, userns *os.File) (*os.File, error) {
	lower, err := cloneTree(image, 0, userns, 0)
	if err != nil {
		return nil, err
	}
	defer lower.Close()
	layer, err := cloneTree(dir, 0, userns, 0)
	if err != nil {
		return nil, err
	}
	defer layer.Close()
	if !h.attachLayers.Load() {
		root, err := overlayOf(lower, layer, userns)
		if !errors.Is(err, unix.EINVAL) {
			return root, err
		}
	}
	// Before Linux 6.15 overlayfs refuses layers that hang nowhere. Later ones need not pay for this.
	detach, err := attach(dir, lower, layer)
	if err != nil {
		return nil, err
	}
	defer detach()
	root, err := overlayOf(lower, layer, userns)
	if err == nil {
		h.attachLayers.Store(true)
	}
	return root, err
}

// attach hangs detached trees into this process's own mount namespace for a moment.
func attach(where string, trees ...*os.File) (detach func(), err error) {
	var points []string
	detach = func() {
		for _, point := range points {
			unix.Unmount(point, unix.MNT_DETACH)
			os.Remove(point)
		}
	}
	for i, tree := range trees {
		point := filepath.Join(where, "layer"+strconv.Itoa(i))
		if err := os.Mkdir(point, 0o700); err != nil {
			detach()
			return nil, err
		}
		points = append(points, point)
		if err := unix.MoveMount(int(tree.Fd()), "", unix.AT_FDCWD, point, unix.MOVE_MOUNT_F_EMPTY_PATH); err != nil {
			detach()
			return nil, fmt.Errorf("attach %s: %w", tree.Name(), err)
		}
	}
	return detach, nil
}

// overlayOf mounts two layers as the id that will own what is written.
func overlayOf(lower, layer, userns *os.File) (*os.File, error) {
	// By the numbers of open files: /proc/mounts inside shows these options, and paths of the host are none of its
	// business.
	if userns == nil {
		return mountOverlay(fdPath(lower), fdPath(layer), "userxattr")
	}
	// overlayfs makes files of its own in the layer while it is mounted, and keeps the mounter's identity for all
	// later copying up. Through the idmapped mount id 0 of the host does not exist, so the mounter has to be the
	// sandbox's root; and as leaving id 0 takes the file capabilities away, they are put back.
	var stat unix.Stat_t
	if err := unix.Fstat(int(layer.Fd()), &stat); err != nil {
		return nil, err
	}
	uid, gid := int(stat.Uid), int(stat.Gid)
	return thread.Run(func() (*os.File, bool, error) {
		header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
		var saved [2]unix.CapUserData
		if err := unix.Capget(&header, &saved[0]); err != nil {
			return nil, true, err
		}
		unix.SetfsgidRetGid(gid)
		unix.SetfsuidRetUid(uid)
		err := unix.Capset(&header, &saved[0])
		var root *os.File
		if err == nil {
			root, err = mountOverlay(fdPath(lower), fdPath(layer), "")
		}
		unix.SetfsuidRetUid(0)
		unix.SetfsgidRetGid(0)
		clean := unix.Capset(&header, &saved[0]) == nil
		return root, clean, err
	})
}

func mountOverlay(lower, layer, flag string) (*os.File, error) {
	context, err := unix.Fsopen("overlay", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("overlay: %w", err)
	}
	defer unix.Close(context)
	for _, option := range [][2]string{
		{"source", "sandbox"},
		{"lowerdir", lower},
		{"upperdir", filepath.Join(layer, "upper")},
		{"workdir", filepath.Join(layer, "work")},
	} {
		if err := unix.FsconfigSetString(context, option[0], option[1]); err != nil {
			return nil, fmt.Errorf("overlay %s: %w", option[0], err)
		}
	}
	// volatile: a sandbox that ends is removed, so its unwritten pages need not reach the disk first.
	for _, flag := range []string{"volatile", flag} {
		if flag == "" {
			continue
		}
		if err := unix.FsconfigSetFlag(context, flag); err != nil {
			return nil, fmt.Errorf("overlay %s: %w", flag, err)
		}
	}
	if err := unix.FsconfigCreate(context); err != nil {
		return nil, fmt.Errorf("overlay: %w", err)
	}
	fd, err := unix.Fsmount(context, unix.FSMOUNT_CLOEXEC, unix.MOUNT_ATTR_NOSUID|unix.MOUNT_ATTR_NODEV)
	if err != nil {
		return nil, fmt.Errorf("overlay: %w", err)
	}
	return os.NewFile(uintptr(fd), "root"), nil
}

// spoolDir opens a directory of the host through a mount of its own: what is opened below it can neither be
// executed nor carry rights, whatever the directory lies on.
func spoolDir(path string, userns *os.File) (*os.File, error) {
	tree, err := cloneTree(path, unix.MOUNT_ATTR_NOSUID|unix.MOUNT_ATTR_NODEV|unix.MOUNT_ATTR_NOEXEC, userns, 0)
	if err != nil {
		return nil, err
	}
	defer tree.Close()
	// The tree is an O_PATH file; execd lists the directory too.
	fd, err := unix.Openat(int(tree.Fd()), ".", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("open %s: %w", path, err)
	}
	return os.NewFile(uintptr(fd), path), nil
}

func fdPath(f *os.File) string { return "/proc/self/fd/" + strconv.Itoa(int(f.Fd())) }
