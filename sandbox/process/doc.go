// Package process has to do with the processes of containers and pauses: it finds, signals, awaits
// and kills them, reads how they ended, and removes what a launch made for them.
//
// # Contract
//
// A process is known by a pidfd, or by its ID and start time, never by its ID alone. One that has ended is
// no error of who wants it to end. What a launch made derives from the ID of its container, and is removed
// when nothing of it is alive; every removal may be repeated. Only what is
// certainly gone counts as gone: trouble with finding out is an error, or is waited for. Nothing here knows what
// a container is, or changes one.
package process
