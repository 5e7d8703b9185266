// SPDX-License-Identifier: Apache-2.0

package command

import "syscall"

// Signal sends a signal to the command's process alone. One that has ended, or never started, gets nothing.
func (c *Command) Signal(number syscall.Signal) {
	if proc := c.process(); proc != nil {
		_ = proc.Signal(number) // it may have ended meanwhile
	}
}
