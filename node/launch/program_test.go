// SPDX-License-Identifier: Apache-2.0

package launch

import (
	"os"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// Whatever numbers the child's files have, the program is still behind its own when it is executed.
func TestTheProgramKeepsItsNumber(t *testing.T) {
	program, err := ownProgram()
	if err != nil {
		t.Fatal(err)
	}
	defer program.Close()
	null, err := nullBehind(program)
	if err != nil {
		t.Fatal(err)
	}
	defer null.Close()
	for number := int(program.Fd()) - 12; number < int(program.Fd())+12; number++ {
		given, err := unix.FcntlInt(null.Fd(), unix.F_DUPFD_CLOEXEC, number)
		if err != nil {
			t.Fatal(err)
		}
		pid, _, err := syscall.StartProcess(fdPath(program), []string{"init", "-test.run=^$"}, &syscall.ProcAttr{
			Dir:   "/",
			Files: []uintptr{null.Fd(), null.Fd(), null.Fd(), uintptr(given)},
		})
		_ = unix.Close(given)
		if err != nil {
			t.Errorf("a file with the number %d: %v", given, err)
			continue
		}
		child, err := os.FindProcess(pid)
		if err != nil {
			t.Fatal(err)
		}
		if state, err := child.Wait(); err != nil || !state.Success() {
			t.Errorf("a file with the number %d: %v %v", given, state, err)
		}
	}
}
