// SPDX-License-Identifier: Apache-2.0

package launch

import (
	"errors"
	"fmt"
	"io"
	"os"

	"golang.org/x/sys/unix"
)

// ownProgram is this program as sandboxes execute it: a sealed copy in memory that may be executed but not read.
//
// Sealed, it cannot be changed through /proc/1/exe, whoever finds a way to open it. And because the sandbox's root
// may not read it, the kernel counts the process's memory as the host's: what /proc tells about execd then belongs
// to nobody inside, not even the numbers of its open files.
func ownProgram() (*os.File, error) {
	self, err := os.Open("/proc/self/exe")
	if err != nil {
		return nil, err
	}
	defer self.Close()
	fd, err := unix.MemfdCreate("opensandbox-init", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING|unix.MFD_EXEC)
	if errors.Is(err, unix.EINVAL) { // before Linux 6.3 all of them are executable
		fd, err = unix.MemfdCreate("opensandbox-init", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	}
	if err != nil {
		return nil, fmt.Errorf("memfd_create: %w", err)
	}
	memory := os.NewFile(uintptr(fd), "opensandbox-init")
	defer memory.Close()
	if _, err := io.Copy(memory, self); err != nil {
		return nil, err
	}
	if err := memory.Chmod(0o111); err != nil {
		return nil, err
	}
	const seals = unix.F_SEAL_SEAL | unix.F_SEAL_SHRINK | unix.F_SEAL_GROW | unix.F_SEAL_WRITE
	if _, err := unix.FcntlInt(memory.Fd(), unix.F_ADD_SEALS, seals); err != nil {
		return nil, fmt.Errorf("seal: %w", err)
	}
	// As an O_PATH file it can be executed: one that is open for writing cannot. And high enough that none of the
	// child's own files takes its number before the exec; see nullBehind.
	path, err := unix.Open(fdPath(memory), unix.O_PATH|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	defer unix.Close(path)
	high, err := unix.FcntlInt(uintptr(path), unix.F_DUPFD_CLOEXEC, 100)
	if err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(high), "opensandbox-init"), nil
}

// nullBehind opens /dev/null with a number higher than that of the program. Between fork and exec the child moves its
// files about, to numbers that begin behind the highest of those it was given. Were all of them just below the program,
// one would take its place, and the exec would find a pipe there (EACCES). With this one among them none can.
func nullBehind(program *os.File) (*os.File, error) {
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	if err != nil {
		return nil, err
	}
	defer null.Close()
	fd, err := unix.FcntlInt(null.Fd(), unix.F_DUPFD_CLOEXEC, int(program.Fd())+1)
	if err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(fd), os.DevNull), nil
}
