// SPDX-License-Identifier: Apache-2.0

package session

import (
	"strings"

	"golang.org/x/sys/unix"
)

// interruptSignal makes the shell skip the rest of its run. A real-time signal, because programs have uses for the
// others.
const interruptSignal = unix.Signal(63) // SIGRTMAX-1 of bash

// The loops below run in the shell for as long as it lives. Commands come in by descriptors of their own: a line on one
// says that a command is in the file behind another; "nonce status" on a third is the answer. While a command runs all
// of them are closed for it: what bash keeps aside meanwhile is closed on exec. A command that finds what is kept aside
// still needs the nonce, which in bash is in no variable while it runs. What it prints is never looked at.
//
// A command runs in the same shell as the loop and can break it. The loop is written so that then it ends, and with it
// the shell, which the daemon sees. So the test whether to go on is arithmetic, which works without any builtin (a
// function may bear the name of one) and also after set -n, and the default is to end.

// bashLoop must become one line: bash counts the lines of a command from that of its eval.
//
// The trap is the way to leave a command without leaving the shell: with extdebug a DEBUG trap that fails has the next
// command skipped, and so on to the end, except the loop's own, which begin with __osb_.
var bashLoop = oneLine(`
shopt -s expand_aliases;
exec 95>&1 96>&6 97<&3 98<&4 99>&5 3<&- 4<&- 5>&- 6>&-;
__osb_run= __osb_skip= __osb_was=merged __osb_status=0 __osb_flags=;
trap 'if [[ $__osb_run ]]; then
	__osb_skip=1 __osb_debug=$(trap -p DEBUG);
	shopt -s extdebug;
	trap "[[ \$BASH_COMMAND == __osb_* ]]" DEBUG;
fi' RTMAX-1;
for ((__osb_ran = __osb_n = 0; __osb_ran == __osb_n; __osb_n++)); do
	__osb_line=;
	IFS=" " builtin read -r -t 1000000000 -u 97 __osb_mode __osb_line 2>/dev/null;
	if [[ -n $__osb_line ]] &&
		IFS= builtin read -r -u 98 __osb_cwd 2>/dev/null &&
		IFS= builtin read -r -u 98 __osb_command 2>/dev/null &&
		builtin printf -v __osb_cwd %b "$__osb_cwd" &&
		builtin printf -v __osb_command %b "$__osb_command" &&
		__osb_ran=$((__osb_n + 1));
	then
		if [[ $__osb_mode != "$__osb_was" ]]; then
			__osb_was=$__osb_mode;
			builtin unset -f exec;
			if [[ $__osb_mode == separate ]]; then exec 2>&96; else exec 2>&95; fi;
		fi;
		__osb_aliases=-u;
		if builtin shopt -q expand_aliases; then __osb_aliases=-s; fi;
		builtin shopt -u expand_aliases;
		builtin eval -- "$__osb_line";
	fi;
done;
builtin exit "$__osb_status"
`)

// bashLine is what the loop runs for a command. It turns set -x, which would show the nonce, off outside of it.
// It is read with aliases off, which could have the names of keywords.
const bashLine = `__osb_line=; builtin shopt "$__osb_aliases" expand_aliases; ` +
	`if [[ -z $__osb_cwd ]] || builtin cd -- "$__osb_cwd"; then ` +
	`__osb_run=1; ` +
	`if [[ $__osb_flags == *x* ]]; then builtin set -x; fi; ` +
	`builtin eval -- "$__osb_command" 95>&- 96>&- 97<&- 98<&- 99>&-; ` +
	`{ __osb_status=$? __osb_flags=$-; __osb_x= builtin set +x; __osb_run=; } 2>/dev/null; ` +
	`else __osb_status=1; fi; ` +
	`if __osb_x= builtin test -n "$__osb_skip"; then ` +
	`__osb_x= builtin trap - DEBUG; shopt -u extdebug; builtin eval -- "$__osb_debug"; __osb_skip=; fi; ` +
	`builtin printf "NONCE %d\n" "$__osb_status" >&99 2>/dev/null`

// shLoop is for images without bash. command takes from eval the right to end the shell over a syntax error.
var shLoop = oneLine(`
exec 7>&1;
__osb_was=merged __osb_status=0;
while { __osb_nonce=; IFS=" " read -r __osb_mode __osb_nonce <&3; } 2>/dev/null; [ -n "$__osb_nonce" ]; do
	__osb_command=$(cat <&4 3<&- 5>&- 6>&- 7>&-);
	if [ "$__osb_mode" != "$__osb_was" ]; then
		__osb_was=$__osb_mode;
		if [ "$__osb_mode" = separate ]; then exec 2>&6; else exec 2>&7; fi;
	fi;
	command eval "$__osb_command" 3<&- 4<&- 5>&- 6>&- 7>&-;
	__osb_status=$?;
	{ command printf "%s %d\n" "$__osb_nonce" "$__osb_status" >&5; } 2>/dev/null;
done;
exit "$__osb_status"
`)

func oneLine(text string) string { return strings.Join(strings.Fields(text), " ") }

// dialect is how one kind of shell is started and fed.
type dialect struct {
	argv []string
	line string                           // what to send for a command, with NONCE in it
	file func(cwd, command string) string // what to put into the file
}

var bash = dialect{
	argv: []string{"bash", "--noprofile", "--norc", "-c", bashLoop},
	line: bashLine,
	// One line each: bash reads lines of a file in blocks, and anything else byte by byte.
	file: func(cwd, command string) string { return escape(cwd) + "\n" + escape(command) + "\n" },
}

var sh = dialect{
	argv: []string{"sh", "-c", shLoop},
	line: "NONCE",
	file: func(cwd, command string) string {
		if cwd == "" {
			return command
		}
		return "cd -- " + quote(cwd) + " && command eval " + quote(command)
	},
}

// escape is the inverse of printf %b for one line.
func escape(text string) string {
	return strings.NewReplacer(`\`, `\\`, "\n", `\n`).Replace(text)
}

func quote(text string) string { return "'" + strings.ReplaceAll(text, "'", `'\''`) + "'" }
