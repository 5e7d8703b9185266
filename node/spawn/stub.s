// SPDX-License-Identifier: Apache-2.0

// Empty: its presence lets clone.go declare functions whose bodies are in the runtime.
