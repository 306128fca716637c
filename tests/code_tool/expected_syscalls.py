"""What the filter must refuse whatever the arguments, and what it must let through: names on x86-64."""

_DENIED = """
    execve execveat fork vfork ptrace process_vm_readv process_vm_writev process_madvise process_mrelease kcmp
    pidfd_open pidfd_getfd pidfd_send_signal tkill rt_sigqueueinfo rt_tgsigqueueinfo setsid setpgid setpriority
    socket connect bind listen accept accept4 sendmmsg recvmmsg sendmsg recvmsg
    memfd_create memfd_secret shmget shmat shmctl shmdt msgget msgsnd msgrcv msgctl semget semop semctl semtimedop
    mq_open mq_unlink mq_timedsend mq_timedreceive mq_notify mq_getsetattr
    truncate chmod fchmod fchmodat fchmodat2 chown fchown lchown fchownat utime utimes futimesat utimensat
    setxattr lsetxattr fsetxattr removexattr lremovexattr fremovexattr setxattrat removexattrat file_setattr
    mknod mknodat chroot pivot_root mount umount2 mount_setattr move_mount open_tree open_tree_attr fsopen fsconfig
    fsmount fspick unshare setns setuid setgid setreuid setregid setresuid setresgid setfsuid setfsgid setgroups
    capset setrlimit personality quotactl quotactl_fd reboot swapon swapoff kexec_load kexec_file_load
    init_module finit_module delete_module io_uring_setup io_uring_enter io_uring_register io_setup io_submit bpf
    perf_event_open userfaultfd add_key request_key keyctl open_by_handle_at name_to_handle_at
    fanotify_init fanotify_mark inotify_init inotify_init1 inotify_add_watch
    landlock_create_ruleset landlock_add_rule landlock_restrict_self seccomp
    sched_setscheduler sched_setparam sched_setattr timer_create signalfd4 syslog acct sethostname setdomainname
    settimeofday clock_settime clock_adjtime adjtimex ioperm iopl modify_ldt lookup_dcookie vhangup arch_prctl
    migrate_pages move_pages mbind set_mempolicy get_mempolicy ioprio_set ioprio_get capget setsockopt mincore cachestat
    readahead sync_file_range sync syncfs mlock munlock mlock2 mseal timer_settime sched_getattr sched_rr_get_interval
    splice tee vmsplice mlockall get_robust_list uselib
"""

_NEEDED = """
    read write close open openat stat fstat newfstatat statx lseek mmap mprotect munmap mremap brk madvise futex rseq
    set_robust_list exit exit_group rt_sigaction rt_sigprocmask rt_sigreturn sigaltstack restart_syscall getrandom
    clock_gettime clock_nanosleep gettimeofday getpid gettid geteuid sched_yield sched_getaffinity getrusage times
    sysinfo uname getcwd chdir mkdirat unlinkat renameat linkat symlinkat getdents64 ftruncate
    flock fsync copy_file_range sendfile pselect6 ppoll epoll_pwait epoll_create1 eventfd2 pipe2 alarm setitimer
    sendto recvfrom shutdown getsockname getpeername getrlimit wait4
"""

DENIED = tuple(_DENIED.split())
NEEDED = tuple(_NEEDED.split())
