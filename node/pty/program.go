// SPDX-License-Identifier: Apache-2.0

package pty

import (
	"os"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"opensandbox.io/node/command"
	"opensandbox.io/node/spawn"
	"opensandbox.io/node/wire"
)

// hangupTime is how long a terminal whose program has ended may take to say that it is at its end.
const hangupTime = time.Second

// program is what runs in a terminal, or behind pipes.
type program struct {
	mode  wire.PtyMode
	proc  *spawn.Process
	input *os.File // the terminal's master side, or the pipe to stdin
	pumps []*command.Pump
}

// openTerminal makes a terminal of the sandbox's own devpts. The program's side is asked for by descriptor: a path
// could lead elsewhere.
func openTerminal(cols, rows int) (master, slave *os.File, err error) {
	fd, err := unix.Open("/dev/ptmx", unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, nil, err
	}
	master = os.NewFile(uintptr(fd), "terminal")
	err = unix.IoctlSetPointerInt(fd, unix.TIOCSPTLCK, 0)
	if err == nil {
		err = resize(fd, cols, rows)
	}
	var peer uintptr
	if err == nil {
		var errno syscall.Errno
		peer, _, errno = unix.Syscall(unix.SYS_IOCTL, uintptr(fd), unix.TIOCGPTPEER, unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC)
		if errno != 0 {
			err = errno
		}
	}
	if err != nil {
		_ = master.Close()
		return nil, nil, err
	}
	return master, os.NewFile(peer, "terminal"), nil
}

func resize(fd, cols, rows int) error {
	return unix.IoctlSetWinsize(fd, unix.TIOCSWINSZ, &unix.Winsize{Col: uint16(cols), Row: uint16(rows)})
}

// start runs the program. Its files are non-blocking on our side only.
func start(spawner *spawn.Spawner, p *command.Program, mode wire.PtyMode, cols, rows int, sink func(command.Stream, []byte)) (*program, error) {
	run := &program{mode: mode}
	spec := p.Spec
	var theirs []*os.File
	defer func() {
		for _, f := range theirs {
			_ = f.Close()
		}
	}()
	fail := func(err error) (*program, error) {
		run.close()
		return nil, err
	}
	if mode == wire.PtyModePty {
		master, slave, err := openTerminal(cols, rows)
		if err != nil {
			return fail(err)
		}
		theirs = append(theirs, slave)
		run.input = master
		run.pumps = []*command.Pump{{File: master, Sink: sink}}
		spec.Stdin, spec.Stdout, spec.Stderr, spec.Terminal = slave, slave, slave, true
	} else {
		for i := range 3 {
			ours, their, err := command.NewPipe(i > 0)
			if err != nil {
				return fail(err)
			}
			theirs = append(theirs, their)
			if i == 0 {
				run.input = ours
				continue
			}
			run.pumps = append(run.pumps, &command.Pump{File: ours, Stream: command.Stream(i - 1), Sink: sink})
		}
		spec.Stdin, spec.Stdout, spec.Stderr = theirs[0], theirs[1], theirs[2]
	}
	proc, err := spawner.Start(spec)
	if err != nil {
		return fail(err)
	}
	run.proc = proc
	return run, nil
}

// wait moves output until the program has ended and all it wrote is moved, and gives its exit code, or -1 and
// the name of the signal that ended it.
func (p *program) wait() (code int, signal string) {
	var pumps sync.WaitGroup
	ended := make(chan struct{})
	for _, pump := range p.pumps {
		pumps.Go(pump.Run)
	}
	go func() {
		pumps.Wait()
		close(ended)
	}()
	<-p.proc.Done()
	if p.mode == wire.PtyModePty {
		// With its program a terminal is hung up, and what is in it comes before the end; not at once.
		timer := time.NewTimer(hangupTime)
		select {
		case <-ended:
		case <-timer.C:
		}
		timer.Stop()
	}
	for _, pump := range p.pumps {
		pump.Drain()
	}
	p.close()
	<-ended
	status, known := p.proc.Status()
	switch {
	case known && status.Exited():
		return status.ExitStatus(), ""
	case known && status.Signaled():
		return -1, command.SignalName(status.Signal())
	}
	return -1, ""
}

func (p *program) close() {
	if p.input != nil {
		_ = p.input.Close()
	}
	for _, pump := range p.pumps {
		_ = pump.File.Close()
	}
}

// kill ends the program and all that came out of it.
func (p *program) kill() {
	tree := p.proc.Tree()
	defer tree.Close()
	select {
	case <-p.proc.Done():
		return
	default:
	}
	tree.Kill()
	_ = p.proc.SignalGroup(unix.SIGKILL)
}

// signal reaches what is in the foreground of the terminal, as a key would.
func (p *program) signal(sig unix.Signal) error {
	if p.mode == wire.PtyModePty {
		var group int
		err := p.control(func(fd int) (err error) {
			group, err = unix.IoctlGetInt(fd, unix.TIOCGPGRP)
			return err
		})
		if err == nil && group > 1 && group != p.proc.Pid {
			return unix.Kill(-group, sig)
		}
	}
	return p.proc.SignalGroup(sig)
}

func (p *program) control(do func(fd int) error) error {
	raw, err := p.input.SyscallConn()
	if err != nil {
		return err
	}
	var failed error
	if err := raw.Control(func(fd uintptr) { failed = do(int(fd)) }); err != nil {
		return err
	}
	return failed
}
