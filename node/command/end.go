// SPDX-License-Identifier: Apache-2.0

package command

import (
	"errors"
	"fmt"
	"io/fs"
	"strconv"
	"syscall"

	"golang.org/x/sys/unix"

	"opensandbox.io/node/wire"
)

// cause is who ended a command, when it was us.
type cause int32

const (
	nobody cause = iota
	byTimeout
	byInterrupt
	byShutdown
)

// classify gives the typed end of a process. oomKills is how often the kernel killed for memory while it ran.
func classify(status syscall.WaitStatus, known bool, why cause, oomKills int64) *wire.CommandEnd {
	if !known {
		return &wire.CommandEnd{Reason: wire.CommandEndReasonLost, Message: "Its end could not be collected."}
	}
	end := &wire.CommandEnd{}
	if status.Signaled() {
		end.Reason, end.Signal = wire.CommandEndReasonSignalled, SignalName(status.Signal())
	} else {
		code := status.ExitStatus()
		end.Reason, end.ExitCode = wire.CommandEndReasonExited, &code
	}
	killed := status.Signaled() && status.Signal() == syscall.SIGKILL
	switch {
	case why == byTimeout && status.Signaled():
		end.Reason = wire.CommandEndReasonTimedOut
		end.Message = "It ran into its time limit."
	case why == byInterrupt:
		// Also when it caught the signal and left by itself: it would not have left then.
		end.Reason = wire.CommandEndReasonKilled
		end.Message = "It was interrupted."
	case why == byShutdown && status.Signaled():
		end.Reason = wire.CommandEndReasonKilled
		end.Message = "The sandbox ended."
	// 137 is how a shell says that what it waited for was killed.
	case oomKills > 0 && (killed || end.ExitCode != nil && *end.ExitCode == 128+int(syscall.SIGKILL)):
		end.Reason = wire.CommandEndReasonOutOfMemory
		end.Message = "The sandbox reached its memory limit and the kernel killed the process that used most."
	}
	return end
}

// startFailed is the end of a command that did not begin.
func startFailed(what string, err error) *wire.CommandEnd {
	return &wire.CommandEnd{Reason: wire.CommandEndReasonStartFailed, Message: startMessage(what, err)}
}

func startMessage(what string, err error) string {
	switch {
	case errors.Is(err, unix.EAGAIN):
		return "The sandbox is at its limit of processes; end some and try again."
	case errors.Is(err, unix.ENOMEM):
		return "The sandbox is out of memory; end something and try again."
	case errors.Is(err, fs.ErrNotExist):
		return fmt.Sprintf("%s: no such program, or the interpreter in its first line is missing.", what)
	case errors.Is(err, fs.ErrPermission):
		return fmt.Sprintf("%s: permission denied; is it executable for this user?", what)
	case errors.Is(err, unix.E2BIG):
		return "Arguments and environment together are too long."
	case errors.Is(err, unix.ENOEXEC):
		return fmt.Sprintf("%s: not a program this machine can run.", what)
	case errors.Is(err, unix.EINVAL):
		return fmt.Sprintf("%s: the kernel refused it; a uid or gid that the sandbox does not have?", what)
	}
	return fmt.Sprintf("%s: %v", what, err)
}

// note adds a sentence to an end's message.
func note(end *wire.CommandEnd, sentence string) {
	if end.Message != "" {
		sentence = end.Message + " " + sentence
	}
	end.Message = sentence
}

// describe puts an end in words, the published ones where there are some.
func describe(end *wire.CommandEnd) string {
	var text string
	switch {
	case end.Reason == wire.CommandEndReasonExited && end.ExitCode != nil:
		text = "exit status " + strconv.Itoa(*end.ExitCode)
	case end.Signal != "":
		text = "signal: " + signalText(end.Signal)
	default:
		return end.Message
	}
	if end.Message != "" {
		text += " (" + end.Message + ")"
	}
	return text
}

// SignalName names a signal as people do.
func SignalName(s syscall.Signal) string {
	if name := unix.SignalName(s); name != "" {
		return name
	}
	return "SIG" + strconv.Itoa(int(s)) // real-time signals have no name
}

func signalText(name string) string {
	if s := unix.SignalNum(name); s != 0 {
		return s.String()
	}
	return name
}
