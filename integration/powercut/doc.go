// Package powercut cuts the power of a node at random moments of its work and looks at what berth makes of
// the disk that is left.
//
// A daemon works on a filesystem on a disk that logs what it is told (blocklog): images are pulled and removed,
// pods come and go. From the log any number of disks are made as they would be after a power cut at one of its
// positions. Each is mounted, a daemon is started on it as after a boot, and everything that can be said of
// images, pods and addresses then is checked.
//
// A few power cuts are tried by default, 200 on each filesystem with BERTH_TORTURE=1, so many with BERTH_CUTS.
// What is chosen at random comes from a seed that is printed; BERTH_SEED repeats it, as far as the kernel's own
// timing lets it.
package powercut
