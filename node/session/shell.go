// SPDX-License-Identifier: Apache-2.0

package session

import (
	"bufio"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"os"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"opensandbox.io/node/command"
	"opensandbox.io/node/spawn"
)

// leaveTime is what an interrupted run has to come to its end in its shell.
const leaveTime = time.Second

// shell is one running shell. A session has one after the other when it must.
type shell struct {
	proc    *spawn.Process
	dialect *dialect
	trigger *os.File // tells the shell that there is a command, and the nonce
	text    *os.File // the command; in memory, shared with the shell. Everybody of its user can open it: no nonce here
	status  *os.File // tells us its end
	pumps   []*command.Pump

	mu      sync.Mutex
	nonce   string   // of the run that is on
	answers chan int // its exit status

	readers sync.WaitGroup
}

// start runs a shell. Output goes to sink, in order.
func start(spawner *spawn.Spawner, p *command.Program, d *dialect, sink func(command.Stream, []byte)) (*shell, error) {
	s := &shell{dialect: d}
	var theirs []*os.File
	defer func() {
		for _, f := range theirs {
			_ = f.Close()
		}
	}()
	outcome := func() (err error) {
		pipe := func(reading bool) (ours, their *os.File) {
			if err == nil {
				ours, their, err = command.NewPipe(reading)
				theirs = append(theirs, their)
			}
			return ours, their
		}
		socket := func() (ours, their *os.File) {
			if err == nil {
				ours, their, err = socketPair()
				theirs = append(theirs, their)
			}
			return ours, their
		}
		trigger, a := socket()
		status, b := socket()
		out, c := pipe(true)
		problems, e := pipe(true)
		s.trigger, s.status = trigger, status
		for stream, f := range []*os.File{out, problems} {
			if f != nil {
				s.pumps = append(s.pumps, &command.Pump{File: f, Stream: command.Stream(stream), Sink: sink})
			}
		}
		if err != nil {
			return err
		}
		fd, err := unix.MemfdCreate("command", unix.MFD_CLOEXEC)
		if err != nil {
			return err
		}
		s.text = os.NewFile(uintptr(fd), "command")
		spec := p.Spec
		spec.Stdout, spec.Stderr, spec.Extra = c, c, []*os.File{a, s.text, b, e}
		s.proc, err = spawner.Start(spec)
		return err
	}()
	if outcome != nil {
		s.close()
		return nil, outcome
	}
	s.readers.Add(1 + len(s.pumps))
	go s.listen()
	for _, p := range s.pumps {
		go func() {
			defer s.readers.Done()
			p.Run()
		}()
	}
	return s, nil
}

// socketPair makes the lines that a shell and we talk on. Not pipes: those of a process can be opened by every other one
// of its user, through /proc/PID/fd, and whoever reads the trigger before the shell does has the nonce. A socket cannot
// be opened that way.
func socketPair() (ours, theirs *os.File, err error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, err
	}
	// Only our side is for the poller: the shell expects reads that wait.
	if err := unix.SetNonblock(fds[0], true); err != nil {
		_, _ = unix.Close(fds[0]), unix.Close(fds[1])
		return nil, nil, err
	}
	return os.NewFile(uintptr(fds[0]), "shell"), os.NewFile(uintptr(fds[1]), "shell"), nil
}

// close gives everything back, when the shell has ended or never began.
func (s *shell) close() {
	for _, f := range []*os.File{s.trigger, s.status, s.text} {
		if f != nil {
			_ = f.Close()
		}
	}
	for _, p := range s.pumps {
		_ = p.File.Close()
	}
	s.readers.Wait()
}

// send hands the shell a command; the channel gets its exit status.
func (s *shell) send(cwd, text string, separate bool) (<-chan int, error) {
	var random [16]byte
	_, _ = rand.Read(random[:]) // never fails
	nonce := hex.EncodeToString(random[:])
	answers := make(chan int, 1)
	s.mu.Lock()
	s.nonce, s.answers = nonce, answers
	s.mu.Unlock()
	if err := s.text.Truncate(0); err != nil {
		return nil, err
	}
	if _, err := s.text.WriteAt([]byte(s.dialect.file(cwd, text)), 0); err != nil {
		return nil, err
	}
	// The position belongs to the shell as well.
	if _, err := s.text.Seek(0, 0); err != nil {
		return nil, err
	}
	mode := "merged"
	if separate {
		mode = "separate"
	}
	// Short, and the shell has read all that was sent before.
	_ = s.trigger.SetWriteDeadline(time.Now().Add(time.Second))
	if _, err := s.trigger.WriteString(mode + " " + strings.Replace(s.dialect.line, "NONCE", nonce, 1) + "\n"); err != nil && !errors.Is(err, syscall.EPIPE) {
		return nil, err // without a reader the shell has ended, which is seen elsewhere
	}
	return answers, nil
}

// forget drops the text of a command that has been read.
func (s *shell) forget() { _ = s.text.Truncate(0) }

// listen reads the ends of runs. Whoever has found the descriptor may write anything: what does not bear the nonce of
// the run that is on counts for nothing, and its length does not matter.
func (s *shell) listen() {
	defer s.readers.Done()
	in := bufio.NewReaderSize(s.status, 256)
	whole := true // the last line was read to its end
	for {
		line, err := in.ReadSlice('\n')
		if err != nil && !errors.Is(err, bufio.ErrBufferFull) {
			return
		}
		first := whole
		whole = err == nil
		if !first || !whole {
			continue
		}
		nonce, text, _ := strings.Cut(strings.TrimSuffix(string(line), "\n"), " ")
		code, err := strconv.Atoi(text)
		s.mu.Lock()
		if err == nil && s.nonce != "" && nonce == s.nonce {
			s.nonce = ""
			s.answers <- code & 0xff
		}
		s.mu.Unlock()
	}
}

// interrupt ends the programs of a run and lets the shell skip the rest, until the shell has reached the run's end;
// false: it does not, and has to go.
func (s *shell) interrupt(began spawn.Moment, answers <-chan int, gone <-chan struct{}) bool {
	if s.dialect != &bash {
		return false
	}
	// First the signal, which waits until the program that runs now is gone.
	_ = s.proc.Signal(interruptSignal)
	again := time.NewTicker(leaveTime / 20)
	defer again.Stop()
	deadline := time.NewTimer(leaveTime)
	defer deadline.Stop()
	for {
		// Again and again, because the shell may have been about to start one more when the signal came.
		tree := s.proc.Tree()
		tree.KillSince(began)
		tree.Close()
		select {
		case <-answers:
			return true
		case <-again.C:
		case <-s.proc.Done():
			return false
		case <-deadline.C:
			return false
		case <-gone:
			return false
		}
	}
}

// drain moves what has been written so far to the sink.
func (s *shell) drain() {
	for _, p := range s.pumps {
		p.Drain()
	}
}
