// SPDX-License-Identifier: Apache-2.0

package isolated

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"opensandbox.io/node/procmask"
)

// The first process has all rights in its own user namespace and none outside. Its mount namespace is a copy of the
// sandbox's, in which it may mount, but neither remove nor uncover what it found.
const (
	// newRoot is where the session's root is put together: a copy of everything hides it, and nobody needs /sys before.
	newRoot = "/sys"
	// scaffold gets a file system in memory, for the uppers of overlays; the copy below newRoot keeps the real one.
	scaffold = "/dev"
	// cover is an empty directory that stays so.
	cover = scaffold + "/empty"
)

// mistake is a problem that the caller made.
type mistake struct{ text, hint string }

func (m *mistake) Error() string { return m.text }

// build makes the root of the session and enters it. It gives the root directory and the uppers.
func build(s *setup) (files []*os.File, err error) {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return nil, fmt.Errorf("make mounts private: %w", err)
	}
	// Opened first, while every path leads to what the sandbox has there. What was opened is what is mounted, however
	// the sandbox's programs rearrange the tree meanwhile.
	sources := make([]int, len(s.Mounts))
	for i, m := range s.Mounts {
		if sources[i], err = openPath(unix.AT_FDCWD, m.Source, 0); err != nil {
			return nil, refused(m.Source, err)
		}
	}
	tmp := -1
	if !s.PrivateTmp {
		if tmp, err = openPath(unix.AT_FDCWD, "/tmp", unix.O_DIRECTORY); err != nil && !errors.Is(err, unix.ENOENT) {
			return nil, refused("/tmp", err)
		}
	}
	for _, step := range []struct {
		name string
		do   func() error
	}{
		{"copy the root", func() error { return unix.Mount("/", newRoot, "", unix.MS_BIND|unix.MS_REC, "") }},
		{"make it read-only", func() error { return makeReadOnly(newRoot) }},
		{"scaffold", func() error { return makeScaffold(s.Bytes) }},
		{"enter it", func() error { return unix.Chdir(newRoot) }},
		{"proc", mountProc},
		{"dev", mountDev},
		{"tmp", func() error { return mountTmp(tmp, s.Bytes) }},
	} {
		if err := step.do(); err != nil {
			return nil, fmt.Errorf("%s: %w", step.name, err)
		}
	}
	uppers, err := mountAll(s.Mounts, sources)
	if err != nil {
		return nil, err
	}
	if s.Network {
		if err := raiseLoopback(); err != nil {
			return nil, fmt.Errorf("loopback: %w", err)
		}
	}
	if err := pivot(); err != nil {
		return nil, fmt.Errorf("pivot: %w", err)
	}
	for _, fd := range append(sources, tmp) {
		_ = unix.Close(fd)
	}
	root, err := unix.Open("/", unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	files = []*os.File{os.NewFile(uintptr(root), "/")}
	for _, kind := range namespaceFiles(s.Network) {
		f, err := os.Open("/proc/self/ns/" + kind)
		if err != nil {
			return nil, err
		}
		files = append(files, f)
	}
	return append(files, uppers...), nil
}

// namespaceFiles are those that a session has of its own, besides the user namespace. One that it shares with the sandbox
// cannot be entered from there. Nobody but the first process itself can open them: it is not dumpable.
func namespaceFiles(network bool) []string {
	kinds := []string{"mnt", "pid", "ipc", "uts"}
	if network {
		kinds = append(kinds, "net")
	}
	return kinds
}

// openPath opens a path for mounting. No symbolic link is followed: a session could have planted one that leads the next
// session elsewhere.
func openPath(dir int, path string, flags int) (int, error) {
	how := unix.OpenHow{Flags: uint64(unix.O_PATH | unix.O_CLOEXEC | flags), Resolve: unix.RESOLVE_NO_SYMLINKS}
	if dir != unix.AT_FDCWD {
		path = strings.TrimLeft(path, "/")
		how.Resolve |= unix.RESOLVE_BENEATH
	}
	for {
		fd, err := unix.Openat2(dir, path, &how)
		if err != unix.EINTR && err != unix.EAGAIN {
			return fd, err
		}
	}
}

func refused(path string, err error) error {
	switch {
	case errors.Is(err, unix.ENOENT):
		return &mistake{path + " does not exist.", "Create it first."}
	case errors.Is(err, unix.ELOOP):
		return &mistake{path + " leads through a symbolic link, which is not followed.", "Give the path it leads to, as readlink -f shows it."}
	case errors.Is(err, unix.ENOTDIR):
		return &mistake{path + " is not a directory, or leads through something that is none.", "Give the path of a directory."}
	}
	return fmt.Errorf("%s: %w", path, err)
}

func viaFD(fd int) string { return "/proc/self/fd/" + strconv.Itoa(fd) }

// mounted is a line of mountinfo.
type mounted struct {
	id, parent int
	path       string
	options    string
}

func mountTable() ([]mounted, error) {
	text, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return nil, err
	}
	var table []mounted
	unescape := strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`)
	for line := range strings.Lines(string(text)) {
		fields := strings.Fields(line)
		if len(fields) < 6 {
			return nil, fmt.Errorf("mountinfo: %q", line)
		}
		id, err1 := strconv.Atoi(fields[0])
		parent, err2 := strconv.Atoi(fields[1])
		if err := errors.Join(err1, err2); err != nil {
			return nil, err
		}
		table = append(table, mounted{id, parent, unescape.Replace(fields[4]), fields[5]})
	}
	return table, nil
}

var mountFlags = map[string]uintptr{
	"nosuid": unix.MS_NOSUID, "nodev": unix.MS_NODEV, "noexec": unix.MS_NOEXEC, "noatime": unix.MS_NOATIME,
	"nodiratime": unix.MS_NODIRATIME, "relatime": unix.MS_RELATIME, "nosymfollow": unix.MS_NOSYMFOLLOW,
}

// makeReadOnly does so with what is mounted at path and all below it. The sandbox's programs may rearrange the tree
// meanwhile: whatever is not found where the table has it, and not covered by another mount, is an error, because it
// would stay writable.
func makeReadOnly(path string) error {
	table, err := mountTable()
	if err != nil {
		return err
	}
	top, err := mountAt(path, table)
	if err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	inside := map[int]bool{top: true}
	for grew := true; grew; {
		grew = false
		for _, m := range table {
			if inside[m.parent] && !inside[m.id] {
				inside[m.id], grew = true, true
			}
		}
	}
	below := slices.DeleteFunc(table, func(m mounted) bool { return !inside[m.id] })
	for _, m := range below {
		if err := m.remountReadOnly(); err != nil && !(errors.Is(err, errElsewhere) && covered(m, below)) {
			return fmt.Errorf("%s: %w", m.path, err)
		}
	}
	return nil
}

// mountAt finds the mount that can be seen at a path, which may be one of several.
func mountAt(path string, table []mounted) (int, error) {
	fd, id, err := openMount(path)
	if err != nil {
		return 0, err
	}
	_ = unix.Close(fd)
	if !slices.ContainsFunc(table, func(m mounted) bool { return m.id == id && m.path == path }) {
		return 0, errElsewhere
	}
	return id, nil
}

// errElsewhere: the path does not lead to the mount.
var errElsewhere = errors.New("it is not where it was mounted")

func (m mounted) remountReadOnly() error {
	fd, id, err := openMount(m.path)
	if err != nil {
		return fmt.Errorf("%w: %w", errElsewhere, err)
	}
	defer unix.Close(fd)
	if id != m.id {
		return errElsewhere
	}
	flags := uintptr(unix.MS_BIND | unix.MS_REMOUNT | unix.MS_RDONLY)
	for option := range strings.SplitSeq(m.options, ",") {
		flags |= mountFlags[option] // those that the sandbox has are locked: without them the kernel refuses
	}
	return unix.Mount("", viaFD(fd), "", flags, "")
}

// openMount opens a path and tells which mount it leads to.
func openMount(path string) (fd, id int, err error) {
	if fd, err = openPath(unix.AT_FDCWD, path, 0); err != nil {
		return -1, 0, err
	}
	var st unix.Statx_t
	err = unix.Statx(fd, "", unix.AT_EMPTY_PATH, unix.STATX_MNT_ID, &st)
	if err == nil && st.Mask&unix.STATX_MNT_ID == 0 {
		err = unix.ENOSYS
	}
	if err != nil {
		_ = unix.Close(fd)
		return -1, 0, err
	}
	return fd, int(st.Mnt_id), nil
}

// covered: another mount lies at the path of m or above, and m is not below that one. Then nobody gets to m.
func covered(m mounted, table []mounted) bool {
	parents := map[int]int{}
	for _, other := range table {
		parents[other.id] = other.parent
	}
	holds := map[int]bool{}
	for id := m.id; id != 0 && !holds[id]; id = parents[id] {
		holds[id] = true
	}
	return slices.ContainsFunc(table, func(c mounted) bool {
		return !holds[c.id] && (m.path == c.path || strings.HasPrefix(m.path, c.path+"/"))
	})
}

func makeScaffold(bytes int64) error {
	options := "mode=0700,size=" + strconv.FormatInt(bytes, 10)
	if err := unix.Mount("isolated", scaffold, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, options); err != nil {
		return err
	}
	if err := unix.Mkdir(cover, 0o555); err != nil {
		return err
	}
	return unix.Mount("none", cover, "tmpfs", unix.MS_RDONLY|unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "mode=0555,size=4k")
}

func mountProc() error {
	if err := unix.Mount("proc", "./proc", "proc", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, ""); err != nil {
		if errors.Is(err, unix.EPERM) {
			// See enter's keepWholeProc.
			return fmt.Errorf("%w: the sandbox was not made for isolated runs", err)
		}
		return err
	}
	return procmask.Apply("dev/null", cover)
}

// mountDev gives the session terminals and shared memory of its own: those of the sandbox's programs belong to the same
// user.
func mountDev() error {
	err := unix.Mount("devpts", "./dev/pts", "devpts", unix.MS_NOSUID|unix.MS_NOEXEC, "newinstance,ptmxmode=0666,mode=0620,max=64")
	if err != nil && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("pts: %w", err)
	}
	const flags = unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC
	if err := unix.Mount("shm", "./dev/shm", "tmpfs", flags, "mode=1777,size=64m"); err != nil && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("shm: %w", err)
	}
	if err := unix.Mount(cover, "./dev/mqueue", "", unix.MS_BIND, ""); err != nil && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("mqueue: %w", err)
	}
	return nil
}

// mountTmp puts the sandbox's /tmp in its place, or one of the session's own.
func mountTmp(shared int, bytes int64) error {
	var err error
	if shared >= 0 {
		err = unix.Mount(viaFD(shared), "./tmp", "", unix.MS_BIND|unix.MS_REC, "")
	} else {
		err = unix.Mount("tmp", "./tmp", "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "mode=1777,size="+strconv.FormatInt(bytes, 10))
	}
	if errors.Is(err, unix.ENOENT) {
		return nil
	}
	return err
}

// mountAll mounts what the session was given, the shallow paths first.
func mountAll(mounts []mount, sources []int) (uppers []*os.File, err error) {
	order := make([]int, len(mounts))
	for i := range order {
		order[i] = i
	}
	slices.SortStableFunc(order, func(a, b int) int {
		return strings.Count(mounts[a].Path, "/") - strings.Count(mounts[b].Path, "/")
	})
	found := map[int]*os.File{}
	for _, i := range order {
		upper, err := mountOne(&mounts[i], sources[i], i)
		if err != nil {
			var bad *mistake
			if errors.As(err, &bad) {
				return nil, err
			}
			return nil, fmt.Errorf("%s: %w", mounts[i].Path, err)
		}
		if upper != nil {
			found[i] = upper
		}
	}
	for i := range mounts {
		if f := found[i]; f != nil {
			uppers = append(uppers, f)
		}
	}
	return uppers, nil
}

func mountOne(m *mount, source, number int) (*os.File, error) {
	root, err := unix.Open(".", unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	defer unix.Close(root)
	var st unix.Stat_t
	if err := unix.Fstat(source, &st); err != nil {
		return nil, err
	}
	isDir := st.Mode&unix.S_IFMT == unix.S_IFDIR
	target, err := openPath(root, m.Path, 0)
	if errors.Is(err, unix.ENOENT) {
		target, err = makePlace(root, m.Path, isDir)
	}
	if err != nil {
		return nil, err
	}
	defer unix.Close(target)
	if m.How == overlay {
		if !isDir {
			return nil, &mistake{m.Path + " is not a directory.", "An overlay needs one."}
		}
		if err := holdsNoMounts(m.Source); err != nil {
			return nil, err
		}
		return mountOverlay(source, target, &st, number)
	}
	if err := unix.Mount(viaFD(source), viaFD(target), "", unix.MS_BIND|unix.MS_REC, ""); err != nil {
		if errors.Is(err, unix.ENOTDIR) {
			return nil, &mistake{m.Path + ": a directory cannot be shown at a file, nor a file at a directory.", "Choose another dest."}
		}
		return nil, err
	}
	if m.How == readOnly {
		return nil, makeReadOnly(newRoot + m.Path)
	}
	return nil, nil
}

// makePlace makes what is missing of a path, which works in the session's own /tmp and in what it may write.
func makePlace(root int, path string, isDir bool) (int, error) {
	at, err := unix.Dup(root)
	if err != nil {
		return -1, err
	}
	names := strings.Split(strings.Trim(path, "/"), "/")
	for i, name := range names {
		next, err := openPath(at, name, 0)
		if errors.Is(err, unix.ENOENT) {
			if isDir || i < len(names)-1 {
				err = unix.Mkdirat(at, name, 0o755)
			} else {
				err = unix.Mknodat(at, name, unix.S_IFREG|0o644, 0)
			}
			if err == nil {
				next, err = openPath(at, name, 0)
			}
		}
		_ = unix.Close(at)
		if errors.Is(err, unix.EROFS) {
			return -1, &mistake{path + " does not exist, and the session cannot have it made: there it only reads.", "Create it in the sandbox first, or choose a path below /tmp."}
		}
		if err != nil {
			return -1, refused(path, err)
		}
		at = next
	}
	return at, nil
}

// holdsNoMounts: an overlay would show empty directories where something is mounted. Nor is it possible over files of
// users that the sandbox does not have, such as those of a directory of the host.
func holdsNoMounts(path string) error {
	table, err := mountTable()
	if err != nil {
		return err
	}
	for _, m := range table {
		if m.path == path || strings.HasPrefix(m.path, path+"/") {
			return &mistake{path + " cannot be an overlay: " + m.path + " is a mount.", "Choose a directory that is the sandbox's own, or the mode ro or rw."}
		}
	}
	return nil
}

// mountOverlay gives the directory that holds what changes.
func mountOverlay(source, target int, lower *unix.Stat_t, number int) (*os.File, error) {
	base := scaffold + "/" + strconv.Itoa(number)
	upper, work := base+"/upper", base+"/work"
	for _, dir := range []string{base, upper, work} {
		if err := unix.Mkdir(dir, 0o700); err != nil {
			return nil, err
		}
	}
	// The root of an overlay has the owner and the mode of its upper directory.
	if err := unix.Chown(upper, int(lower.Uid), int(lower.Gid)); err != nil {
		return nil, err
	}
	if err := unix.Chmod(upper, lower.Mode&0o7777); err != nil {
		return nil, err
	}
	options := "lowerdir=" + viaFD(source) + ",upperdir=" + upper + ",workdir=" + work + ",userxattr"
	if err := unix.Mount("overlay", viaFD(target), "overlay", unix.MS_NOSUID|unix.MS_NODEV, options); err != nil {
		return nil, fmt.Errorf("overlay: %w", err)
	}
	fd, err := unix.Open(upper, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(fd), "upper"), nil
}

func raiseLoopback() error {
	sock, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(sock)
	request, err := unix.NewIfreq("lo")
	if err != nil {
		return err
	}
	request.SetUint16(unix.IFF_UP | unix.IFF_RUNNING)
	return unix.IoctlIfreq(sock, unix.SIOCSIFFLAGS, request)
}

// pivot makes the working directory the root and drops the old one, with all that is only there.
func pivot() error {
	if err := unix.PivotRoot(".", "."); err != nil {
		return err
	}
	if err := unix.Unmount(".", unix.MNT_DETACH); err != nil {
		return err
	}
	return unix.Chdir("/")
}
