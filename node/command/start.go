// SPDX-License-Identifier: Apache-2.0

package command

import (
	"errors"

	"golang.org/x/sys/unix"

	"opensandbox.io/node/reply"
	"opensandbox.io/node/wire"
)

// StartFault is the answer of a route whose program cannot be started. At a limit of the sandbox it is the caller who
// can do something about it, which a plain RUNTIME_ERROR would hide.
//
//	return command.StartFault("The session's shell", "bash", err)
func StartFault(subject, program string, err error) *reply.Fault {
	code := wire.CodeRuntimeError
	if errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.ENOMEM) {
		code = wire.CodeResourceExhausted
	}
	return reply.Errorf(code, "%s cannot be started: %s", subject, startMessage(program, err))
}
